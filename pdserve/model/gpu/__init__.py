"""Kernels in Triton: what the CUDA path computes itself. A file has kernels and the functions that launch them."""
