"""Deployments of fake children on several hosts."""

from __future__ import annotations

from tests.fakes.deployment import logged_spec, make_spec, play, runtime

__all__ = ["logged_spec", "make_spec", "play", "runtime"]
