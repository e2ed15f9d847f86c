"""Start of gateways. Used by `mstarctl serve`."""
