"""Hosts that run the deployments of a gateway's models: this one, and others through ssh."""
