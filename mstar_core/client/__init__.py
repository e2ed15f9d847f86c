"""Speaks to a deployment's api over HTTP, to nothing else. No torch."""

from __future__ import annotations

from mstar_core.client.api import ApiClient
from mstar_core.client.frames import Line, read_lines
from mstar_core.client.problems import problem_of
from mstar_core.client.wav import WavFile

__all__ = ["ApiClient", "Line", "WavFile", "problem_of", "read_lines"]
