"""Other hosts of a user: their names, and ssh, which reaches them."""
