"""The serving runtime: graphs of components, and the processes that walk requests through them.

Programs of users import the client from here; it is loaded when it is first named, so that every process of the runtime
stays as light as it was.
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
