"""Attention over the paged cache: one backend per rank, chosen by name and imported when chosen."""

from __future__ import annotations

from mstar_core.engine.attention.backend import BACKENDS, AttentionBackend, backend, make_pools

__all__ = ["BACKENDS", "AttentionBackend", "backend", "make_pools"]
