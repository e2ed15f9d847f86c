"""Screen of a gateway: its models and the memory that they hold."""
