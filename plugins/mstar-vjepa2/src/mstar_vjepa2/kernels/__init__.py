"""CUDA kernels of V-JEPA 2. Imported by name, on a CUDA device only."""
