"""Offers of a plugin besides its models: plans, workloads, checks and sample inputs. Plain data and lazy targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final, Literal

from mstar_core.errors import PluginError

if TYPE_CHECKING:
    from mstar_core.config.resolved import ResolvedConfig

SAMPLE_KINDS: Final[Mapping[str, str]] = {
    ".png": "image",
    ".jpg": "image",
    ".wav": "audio",
    ".mp4": "video",
    ".npy": "tensor",
}
"""Modalities of sample files by their endings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Input of a planner: the checked configuration and the devices, entry i for rank i."""

    config: ResolvedConfig
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """A load-test workload. options: keyword arguments of its function.

    target: "pkg.mod:function", called as function(card: ServedModel, seed: int, **options). It yields a
    `WorkloadRequest` for each request, without end (`mstar_core.workloads`).
    """

    name: str
    title: str
    target: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding of `mstarctl doctor`. hint: the remedy if the state is not ok."""

    name: str
    state: Literal["ok", "warning", "failed"]
    detail: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleInputs:
    """Inputs of one request. name: one word; title: what the request does, in one line.

    files: name and content of each, in the order in which they are sent; the ending of a name is one of `SAMPLE_KINDS`.
    """

    name: str
    title: str
    outputs: tuple[str, ...]
    text: str | None = None
    files: tuple[tuple[str, bytes], ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Modalities of the inputs in order, the text last."""
        files = (kind_of(name) for name, _ in self.files)
        return (*files, *(("text",) if self.text is not None else ()))


def kind_of(name: str) -> str:
    """Return the modality of a sample file. Raises PluginError for an unknown ending."""
    suffix = PurePath(name).suffix.lower()
    if suffix not in SAMPLE_KINDS:
        raise PluginError(f"the sample file {name!r} has an unknown ending", hint=f"one of {', '.join(SAMPLE_KINDS)}")
    return SAMPLE_KINDS[suffix]
