"""One request from the command line: what is sent, where the answer goes, how fast it came. Used by `mstarctl call`."""
