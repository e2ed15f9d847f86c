"""HTTP of the gateway: routes requests to replicas and streams bytes both ways."""
