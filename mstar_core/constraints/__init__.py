"""Constrained decoding: grammars of requests, vocabularies, and matchers that say which ids may follow."""
