"""Proofs and measurements of deployments on several hosts, which are network namespaces of one machine."""
