"""Start of gateways and the way to running ones. Used by `mstarctl serve` and `ps`."""
