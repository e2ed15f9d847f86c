"""Parsing of requests: typed fields, model parameters, chat messages and media."""
