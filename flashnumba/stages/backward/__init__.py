"""The stage backward: the gradients of attention. ``reference.py`` tells the mathematics."""
