"""Serving runtime for multimodal models, with the client for users' programs.

The client is imported when one of its names is first used, so that processes of the runtime do not load it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mstar_core.version import __version__

if TYPE_CHECKING:
    from mstar_core.client import AsyncMStarClient, ClientError, MStarClient, MStarError

__all__ = ["AsyncMStarClient", "ClientError", "MStarClient", "MStarError", "__version__"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mstar_core import client

    return vars(client)[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
