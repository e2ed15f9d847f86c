"""Checked configuration of a deployment, with the source of every value. Made by `resolve`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mstar_core.config.deployment import ApiConfig, KVCacheConfig
from mstar_core.config.located import Located


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes that share ranks. walks: canonical names, None = all. place: the group's position in the file."""

    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    walks: tuple[str, ...] | None
    tp_size: int
    key: str
    place: Located = field(repr=False, compare=False)
    memory_fraction: float | None = None

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The ranks in groups of tp_size, in the order of the file."""
        return tuple(self.ranks[i : i + self.tp_size] for i in range(0, len(self.ranks), self.tp_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """Configuration of a deployment. provenance: key -> `FILE:LINE`, `default`, or the flag that set it."""

    model: str
    name: str
    is_tiny: bool
    weights: str | None
    dtype: str | None
    attention: str | None
    quantization: str
    max_seq_len: int
    max_concurrent_requests: int | None
    max_queue: int
    token_budget: int
    wait_spin_us: int | None
    model_kwargs: Mapping[str, Any]
    node_groups: tuple[NodeGroup, ...]
    kv_cache: KVCacheConfig
    api: ApiConfig
    config_file: str | None
    provenance: Mapping[str, str]

    @property
    def rank_count(self) -> int:
        """Number of ranks that the node groups use: 0 .. rank_count - 1."""
        return max(rank for group in self.node_groups for rank in group.ranks) + 1

    def values(self) -> dict[str, Any]:
        """Return every value by its key, as `config show --resolved` prints them."""
        flat: dict[str, Any] = {
            "model": f"{self.model}:tiny" if self.is_tiny else self.model,
            "name": self.name,
            "weights": self.weights,
            "dtype": self.dtype,
            "attention": self.attention,
            "quantization": self.quantization,
            "max_seq_len": self.max_seq_len,
            "max_concurrent_requests": self.max_concurrent_requests,
            "max_queue": self.max_queue,
            "token_budget": self.token_budget,
            "wait_spin_us": self.wait_spin_us,
        }
        flat |= {f"model_kwargs.{name}": value for name, value in self.model_kwargs.items()}
        for index, group in enumerate(self.node_groups):
            flat |= {
                f"node_groups.{index}.node_names": list(group.nodes),
                f"node_groups.{index}.ranks": list(group.ranks),
                f"node_groups.{index}.graph_walks": None if group.walks is None else list(group.walks),
                f"node_groups.{index}.tp_size": group.tp_size,
                f"node_groups.{index}.memory_fraction": group.memory_fraction,
            }
        for section, struct in (("kv_cache", self.kv_cache), ("api", self.api)):
            flat |= {
                f"{section}.{word}": getattr(struct, word) for word in struct.__struct_fields__ if word != "api_keys"
            }
        return flat

    def source(self, key: str) -> str:
        """Return the source of the value of `key`."""
        return self.provenance.get(key, "default")
