"""Deployments behind the models of a gateway."""
