"""Deployment files: schema, loading with provenance, and placement. Imports no torch."""
