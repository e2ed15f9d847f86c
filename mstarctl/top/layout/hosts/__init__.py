"""Hosts: the list from which `top` starts, and frames of a deployment's hosts around their ranks."""
