"""Link between the ranks of a tensor-parallel group: step plans one way, checksums the other."""
