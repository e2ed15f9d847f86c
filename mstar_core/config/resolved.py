"""Checked configuration of a deployment, with the source of every value. Made by `resolve`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mstar_core.config.deployment import ApiConfig, KVCacheConfig, LogConfig, TransportConfig
from mstar_core.config.located import Located
from mstar_core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes that share ranks. walks: canonical names, None = all. place: the group's position in the file.

    device_gb: least memory of the device of each rank, in GB; None if it is not stated.
    """

    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    walks: tuple[str, ...] | None
    tp_size: int
    key: str
    place: Located = field(repr=False, compare=False)
    memory_fraction: float | None = None
    device_gb: float | None = None

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The ranks in groups of tp_size, in the order of the file."""
        return tuple(self.ranks[i : i + self.tp_size] for i in range(0, len(self.ranks), self.tp_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """Configuration of a deployment.

    variant: of an embedded checkpoint, such as `tiny`, or empty. provenance: key -> `FILE:LINE`, `default`, or the flag
    that set it.
    """

    model: str
    name: str
    variant: str
    weights: str | None
    dtype: str | None
    attention: str | None
    quantization: str
    max_seq_len: int
    max_concurrent_requests: int | None
    max_queue: int
    token_budget: int
    image_share: float
    feature_cache_bytes: int
    wait_spin_us: int | None
    hang_s: float
    step_limit_s: float
    model_kwargs: Mapping[str, Any]
    node_groups: tuple[NodeGroup, ...]
    kv_cache: KVCacheConfig
    transport: TransportConfig
    api: ApiConfig
    logs: LogConfig
    config_file: str | None
    provenance: Mapping[str, str]

    @property
    def rank_count(self) -> int:
        """Number of ranks that the node groups use: 0 .. rank_count - 1."""
        return max(rank for group in self.node_groups for rank in group.ranks) + 1

    def source(self, key: str) -> str:
        """Return the source of the value of `key`."""
        return self.provenance.get(key, "default")

    def error(self, key: str, title: str, detail: str = "", hint: str = "") -> ConfigError:
        """Return a ConfigError for the value of `key`, with its file and line or the flag that set it."""
        source = self.source(key)
        file, _, line = source.rpartition(":")
        is_line = bool(file) and line.isdigit() and not source.startswith("--")
        place = Located(None, source, file, int(line)) if is_line else Located(None, source)
        return place.error(title, key, detail, hint)
