"""What the measurements and GPU tests of Pi0.5 and V-JEPA 2 share: modules, engines, and a driver around them."""
