"""Attention kernels for CUDA."""
