"""Static files of the web page and of /docs, read from the package. Used by `routes.console`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from mstar_core.errors import NotFound

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Everything comes from the deployment itself; inline scripts and styles are blocked."""

HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One static file: its bytes and content type."""

    body: bytes
    content_type: str


def asset(name: str) -> Asset:
    """Return a static file by its name, such as `core/dom.js`.

    Raises NotFound for every name that the package does not contain.
    """
    served = _assets().get(name)
    if served is None:
        raise NotFound(f"/assets/{name[:80]} does not exist")
    return served


@cache
def _assets() -> dict[str, Asset]:
    # Listing the folders once makes paths such as `..` unreachable: a name is a key, never part of a path.
    entries = _files(files("mstar_core.api.console") / "static")
    kinds = ((name, entry, "." + name.rpartition(".")[2]) for name, entry in entries)
    return {name: Asset(entry.read_bytes(), TYPES[kind]) for name, entry, kind in kinds if kind in TYPES}


def _files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    """Yield the files below a folder with their names, such as `core/dom.js`."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files(entry, f"{prefix}{entry.name}/")
        else:
            yield f"{prefix}{entry.name}", entry
