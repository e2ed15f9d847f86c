"""Triton kernels of Pi0.5. Imported by name, on a CUDA device only."""
