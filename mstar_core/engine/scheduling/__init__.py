"""Scheduler of a KV node: owner of its host state, which nothing else writes."""
