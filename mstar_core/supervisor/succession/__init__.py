"""Takeover of a deployment's listening socket, GPUs and name by another deployment: both sides, between supervisors."""
