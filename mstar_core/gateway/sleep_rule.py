"""Rule by which a model behind the gateway can sleep, and the caution of a `keep` that needs a sleep it cannot have."""

from __future__ import annotations

from mstar_core.gateway.serve_file import ModelEntry, ServeFile
from mstar_core.gateway.serve_values import KeepKind

WAY_OUT = "sleepable: true of the model lets it sleep"


def with_default(entry: ModelEntry, serve: ServeFile) -> bool | None:
    """Return the value of `sleepable` for a model's deployments, None to leave it to its own deployment file."""
    if "sleepable" in entry.set:
        return entry.set["sleepable"] is True
    chosen = serve.sleepable if entry.sleepable is None else entry.sleepable
    return None if chosen is None and _has_own_file(entry) else chosen is not False


def can_sleep(entry: ModelEntry, serve: ServeFile, *, has_gpu: bool) -> bool | None:
    """Return whether a model can sleep, as far as its entry says; None if only its deployment file does.

    has_gpu: a deployment without `device` computes on a GPU. CPU ranks can always sleep.
    """
    if entry.url is not None:
        return None
    if entry.device == "cpu" or entry.device is None and not has_gpu:
        return True
    return with_default(entry, serve)


def _has_own_file(entry: ModelEntry) -> bool:
    return entry.file is not None or str(entry.target).endswith((".yaml", ".yml"))


def caution_of(entry: ModelEntry, can: bool | None) -> str:
    """Return what happens instead if `keep` needs a sleep that the model cannot have; empty without a conflict."""
    if can is not False or entry.keep.kind is not KeepKind.IDLE:
        return ""
    what = f"keep is {entry.keep_text}, but its GPUs cannot give memory back"
    return f"{what}: it ends instead, and its next request starts it again; {WAY_OUT}"
