"""Codes to sound."""
