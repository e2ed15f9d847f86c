"""Memory ledger of this host: which deployment holds how many bytes of each GPU."""
