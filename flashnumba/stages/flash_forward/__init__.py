"""The stage flash_forward: attention without S in memory. ``reference.py`` tells the mathematics."""
