"""Hardware of this host, as the driver and the kernel list it."""
