"""Deployments of fake children."""

from __future__ import annotations

from tests.fakes.deployment import logged_spec, make_spec, play, runtime, start

__all__ = ["logged_spec", "make_spec", "play", "runtime", "start"]
