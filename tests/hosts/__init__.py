"""Whole deployments over several hosts, which are agents on this machine at addresses of their own."""
