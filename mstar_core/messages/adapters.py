"""Messages between the supervisor and its children about LoRA adapters that are loaded and unloaded while it serves."""

from __future__ import annotations

import msgspec

from mstar_core.config.deployment import AdapterPlan


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="load_adapter"):
    """Supervisor to workers and followers: load an adapter. Each answers with AdapterDone."""

    adapter: AdapterPlan


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="unload_adapter"):
    """Supervisor to the api: accept no more requests for an adapter; it answers once none is left.

    Then, or if a load has failed, to workers and followers: drop it. They answer at once.
    """

    number: int


class AdapterDone(msgspec.Struct, frozen=True, kw_only=True, tag="adapter_done", omit_defaults=True):
    """Child to supervisor: the last request about an adapter is carried out. title, detail, hint: of an error."""

    number: int
    title: str = ""
    detail: str = ""
    hint: str = ""


AdapterMessage = LoadAdapter | UnloadAdapter | AdapterDone
