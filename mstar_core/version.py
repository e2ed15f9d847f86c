"""Version of the distribution. The build reads it from this source; nothing is imported for it."""

from __future__ import annotations

__version__ = "0.2.0"
