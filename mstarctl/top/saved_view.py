"""Screen, order and filter with which `top` was left, one small file per deployment in the state folder."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec

from mstar_core.errors import UsageError
from mstar_core.host.private_files import write_private
from mstar_core.observe.filter import Filter
from mstarctl.client.log_dirs import state_root
from mstarctl.top.layout.request_list import BY_KEY
from mstarctl.top.layout.state import PAGES

FOLDER: Final = ".top"
"""Not a name of a deployment, whose logs are beside it."""


class SavedView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """First screen of `top`, with its order and filter. filter: text of the filter language."""

    page: str = "overview"
    sort: str = "at"
    is_rising: bool = False
    filter: str = ""


def path_of(name: str) -> Path:
    """Return the file of a deployment. Its name comes from another host, so it is quoted."""
    return state_root() / FOLDER / f"{quote(name, safe='')}.json"


def load_view(name: str) -> SavedView:
    """Return the saved view of a deployment. A file that is missing, damaged or of another version is ignored."""
    try:
        view = msgspec.json.decode(path_of(name).read_bytes(), type=SavedView)
        Filter.parse(view.filter, expressions=True)
    except (OSError, msgspec.MsgspecError, UsageError):
        return SavedView()
    return view if view.page in PAGES and view.sort in BY_KEY else SavedView()


def save_view(name: str, view: SavedView) -> None:
    """Save a view. A folder that cannot be written loses it, because leaving `top` must not fail."""
    path = path_of(name)
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, msgspec.json.encode(view))
