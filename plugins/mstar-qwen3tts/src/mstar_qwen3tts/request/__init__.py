"""Requests: text to ids, and ids to the rows of a prompt."""
