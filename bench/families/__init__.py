"""Shared parts of the Pi0.5 and V-JEPA 2 benchmarks and GPU tests: modules, engines, and a driver around them."""
