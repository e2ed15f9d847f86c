"""Attention kernels for CUDA, in Triton and Gluon."""
