"""Triton kernels behind the layers on CUDA."""
