"""CUDA graph capture, buckets and replay."""
