"""Start of a rank: loads its nodes, compiles and captures their kernels. `build.py` is the entry."""
