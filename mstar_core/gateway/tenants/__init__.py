"""Tenants of a gateway: keys, rights, quotas, fair order and usage."""

from mstar_core.gateway.tenants.accounts.terms import ANONYMOUS, Terms

__all__ = ["ANONYMOUS", "Terms"]
