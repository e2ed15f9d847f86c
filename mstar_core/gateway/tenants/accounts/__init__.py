"""Accounts of tenants: their terms and keys, where these are stored, and the tenant of a request."""
