"""Resources of this host: run directories, ports, GPU locks, caches and groups."""
