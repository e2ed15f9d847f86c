"""Paged KV-cache memory: pages, page tables, slots and their sizing."""
