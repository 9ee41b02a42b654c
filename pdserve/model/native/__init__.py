"""A decoder as a program of the C++ kernels in `csrc`: the CPU path for bf16 models."""
