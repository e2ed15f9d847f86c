"""Robots: state and action conventions, normalisation and observation formats."""
