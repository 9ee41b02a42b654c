"""Triton kernels of the CUDA path. A file holds kernels and the functions that launch them."""
