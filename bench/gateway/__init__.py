"""Parts of the benchmark of four models behind one gateway."""
