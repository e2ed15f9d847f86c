"""The kit for plugin authors' own tests: the checks of `mstarctl plugins check` as a pytest class."""

from __future__ import annotations

from mstar_core.plugin.testing.model_conformance import ModelConformance

__all__ = ["ModelConformance"]
