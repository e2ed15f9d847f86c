"""Deployment files: their schema, loading with provenance, explanation. No torch."""
