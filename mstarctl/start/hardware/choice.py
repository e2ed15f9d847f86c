"""Choice of a shipped deployment file for `--gpus auto:N` and `--fit`, with the reason for each file.

Of the files that the GPUs can hold, the one that uses most of them is taken. Among equals the model's default comes
first, then whole replicas, nodes on different ranks, and walks on different ranks. Tensor parallelism comes last,
because replicas serve more requests with the same GPUs; it is for models that do not fit otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mstar_core.config.files.load import ConfigFile, read_file, shipped, split_name
from mstar_core.config.files.resolution import resolve
from mstar_core.config.resolved import ResolvedConfig
from mstar_core.errors import ConfigError, NotFound
from mstar_core.plugin import ModelSpec
from mstarctl.output.units import counted

GB: Final = 10**9
KINDS: Final = (
    "copies of nodes",
    "nodes on different ranks",
    "walks of a node on different ranks",
    "all nodes on one rank",
    "tensor parallelism",
)
"""Kinds of placement, in the order of preference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One shipped file. obstacle: why the GPUs cannot hold it, "" if they can."""

    name: str
    file: ConfigFile
    ranks: int
    kind: int
    is_default: bool
    obstacle: str

    @property
    def order(self) -> tuple[bool, bool, int, bool, int, str]:
        """Sorting key: the best first."""
        is_parallel = self.kind == len(KINDS) - 1
        return bool(self.obstacle), is_parallel, -self.ranks, not self.is_default, self.kind, self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Files of a model for some GPUs, the best first."""

    candidates: tuple[Candidate, ...]
    gpu_count: int

    @property
    def best(self) -> Candidate:
        """The file that is taken."""
        return self.candidates[0]

    def why(self, candidate: Candidate) -> str:
        """Return why a file is taken, or why another one is."""
        best, use = self.best, f"uses {candidate.ranks} of {counted(self.gpu_count, 'GPU')}"
        if candidate.obstacle:
            return candidate.obstacle
        if candidate is best:
            first = "the model's default" if best.is_default else KINDS[best.kind]
            return f"{use}; {first}"
        if candidate.order[1] != best.order[1]:
            return f"{KINDS[candidate.kind]} is for models that do not fit otherwise"
        if candidate.ranks != best.ranks:
            return use
        if best.is_default or candidate.is_default:
            return f"{best.name} is the model's default"
        if candidate.kind != best.kind:
            return f"{KINDS[best.kind]} come before {KINDS[candidate.kind]}"
        return f"{best.name} comes first by name"


def auto_count(gpus: str | None) -> int | None:
    """Return N of `--gpus auto:N`, None for other values."""
    word, colon, number = (gpus or "").partition(":")
    return int(number) if word == "auto" and colon and number.isdigit() else None


def choose(model: ModelSpec, memories: Sequence[int], *, variant: str = "") -> Choice:
    """Choose among the files that a model ships. memories: bytes of each GPU in order; 0 if unknown.

    variant: of an embedded checkpoint, which fits every GPU. Raises ConfigError with the reason for each file if none
    fits.
    """
    candidates = sorted(
        (_candidate(model, name, path, memories, variant=variant) for name, path in _files(model, variant).items()),
        key=lambda candidate: candidate.order,
    )
    choice = Choice(candidates=tuple(candidates), gpu_count=len(memories))
    if not candidates or candidates[0].obstacle:
        raise ConfigError(
            f"no deployment file of {model.name} fits {_described(memories)}",
            "\n".join(f"{candidate.name}: {candidate.obstacle}" for candidate in candidates) or "the plugin ships none",
            "give more or larger GPUs, or a file of your own: --config FILE",
            key="gpus",
        )
    return choice


def _files(model: ModelSpec, variant: str) -> dict[str, Path]:
    """Return the files of a plugin that are for this model, not for another one, nor for another checkpoint."""
    return {name: path for name, path in shipped(model).items() if _is_for(model, variant, read_file(path))}


def _is_for(model: ModelSpec, variant: str, file: ConfigFile) -> bool:
    try:
        name, variant_of_file = split_name(file.model)
    except NotFound:
        return False
    return name.rpartition("/")[2] in (model.name, *model.aliases) and variant_of_file in ("", variant)


def _candidate(model: ModelSpec, name: str, path: Path, memories: Sequence[int], *, variant: str) -> Candidate:
    file = read_file(path)
    config = resolve(model, file, variant=variant)
    return Candidate(
        name=name,
        file=file,
        ranks=config.rank_count,
        kind=_kind(config),
        is_default=name == model.default_config.removesuffix(".yaml"),
        obstacle=obstacle(config, memories, variant=variant),
    )


def _kind(config: ResolvedConfig) -> int:
    groups = config.node_groups
    if any(group.tp_size > 1 for group in groups):
        return 4
    if any(len(group.ranks) > 1 for group in groups):
        return 0
    if config.rank_count == 1:
        return 3
    return 2 if any(group.graph_walks is not None for group in groups) else 1


def obstacle(config: ResolvedConfig, memories: Sequence[int], *, variant: str) -> str:
    """Return why GPUs cannot hold a file, "" if they can. memories: bytes of each GPU in order; 0 if unknown."""
    if config.rank_count > len(memories):
        return f"needs {counted(config.rank_count, 'GPU')}"
    for rank in range(0 if variant else config.rank_count):
        needed = max((group.device_gb or 0.0 for group in config.node_groups if rank in group.ranks), default=0.0)
        if memories[rank] and needed * GB > memories[rank]:
            return f"rank {rank} needs a GPU of {needed:g} GB, and its GPU has {memories[rank] / GB:.0f}"
    return ""


def _described(memories: Sequence[int]) -> str:
    sizes = ", ".join(f"{memory / GB:.0f}" if memory else "unknown" for memory in memories)
    return f"{counted(len(memories), 'GPU')} of {sizes} GB"
