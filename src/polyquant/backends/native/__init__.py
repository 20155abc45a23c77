"""The CPU, by compiled kernels: kernels.py is the table of them."""
