"""The stage gemm: C = A B, from one thread an element to tensor cores. ``reference.py`` tells the mathematics."""
