"""Configurations for people: a commented start file, and the differences of two. Used by `mstarctl config`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from mstar_core.config.resolved import ResolvedConfig
from mstar_core.config.schema import Setting, words_of
from mstar_core.plugin import ModelSpec
from mstarctl.authoring.config_schema import default_shown

UNSET: Final = ("api_keys", "keys_in_file", "metrics_keys")
"""Fields of the api's section that are not keys of a file: secrets, and what is derived from them."""


def commented_file(spec: ModelSpec) -> str:
    """Return a complete file for `spec` on one rank: required keys, and every default as a comment."""
    lines = [
        f"# {spec.title}: every node on one rank.",
        "# Check it: mstarctl config validate FILE    Explain a key: mstarctl config explain KEY",
        f"model: {spec.name}",
        "",
    ]
    lines += list(_groups(spec))
    for word, item in words_of("").items():
        if word in ("model", "node_groups"):
            continue
        lines += ["", f"# {item.doc}"]
        lines += (
            _section(item)
            if item.kind == "section"
            else _kwargs(spec)
            if item.kind == "mapping"
            else [f"# {word}: {_default(item, spec)}"]
        )
    return "\n".join(lines) + "\n"


def _groups(spec: ModelSpec) -> Iterator[str]:
    words = words_of("node_groups[]")
    folded = [node.name for node in spec.nodes if node.of is not None]
    walks = [walk for partition in spec.partitions for walk in partition.walks]
    yield "# Which nodes run on which ranks; rank i takes the i-th device."
    yield "node_groups:"
    yield f"  - node_names: [{', '.join(node.name for node in spec.nodes if node.of is None)}]"
    if folded:
        yield f"    # On a cache branch, with their parent unless a group names them: {', '.join(folded)}"
    yield "    ranks: [0]"
    yield f"    # {words['graph_walks'].doc}"
    yield f"    # graph_walks: [{', '.join(walks)}]"
    yield f"    # {words['tp_size'].doc}"
    yield f"    # tp_size: {default_shown(words['tp_size'])}"


def _section(item: Setting) -> list[str]:
    lines = [f"# {item.word}:"]
    for word, part in words_of(item.key).items():
        lines += [
            f"#   {word}: {'null' if part.nullable else default_shown(part)}"
            f"    # {part.doc} {part.allowed.capitalize()}."
        ]
    return lines


def _kwargs(spec: ModelSpec) -> list[str]:
    if not spec.model_kwargs:
        return [f"# {spec.name} has no options."]
    return ["# model_kwargs:", *(f"#   {name}: {json.dumps(value)}" for name, value in spec.model_kwargs.items())]


def _default(item: Setting, spec: ModelSpec) -> str:
    return {"name": spec.name, "max_seq_len": str(spec.max_seq_len)}.get(
        item.key, "null" if item.nullable else default_shown(item)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Values of a file or of a running deployment by key, with their sources."""

    values: Mapping[str, Any]
    sources: Mapping[str, str]

    @classmethod
    def of(cls, config: ResolvedConfig) -> Settings:
        """Return the values of a configuration after a JSON round trip, comparable with a running deployment's."""
        values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(values_of(config), enc_hook=str))
        return cls(values=values, sources={key: config.source(key) for key in values})


PLAIN: Final = (
    "name",
    "weights",
    "dtype",
    "attention",
    "quantization",
    "max_seq_len",
    "max_concurrent_requests",
    "max_queue",
    "token_budget",
    "image_share",
    "feature_cache_bytes",
    "wait_spin_us",
    "hang_s",
    "step_limit_s",
)
"""Keys outside sections whose values a configuration holds under the same name."""


def values_of(config: ResolvedConfig) -> dict[str, Any]:
    """Return every value by its key, as `config show --resolved` prints them."""
    flat: dict[str, Any] = {"model": f"{config.model}:{config.variant}" if config.variant else config.model}
    flat |= {key: getattr(config, key) for key in PLAIN}
    flat |= {f"model_kwargs.{name}": value for name, value in config.model_kwargs.items()}
    for index, group in enumerate(config.node_groups):
        flat |= {
            f"node_groups.{index}.node_names": list(group.nodes),
            f"node_groups.{index}.ranks": list(group.ranks),
            f"node_groups.{index}.graph_walks": None if group.walks is None else list(group.walks),
            f"node_groups.{index}.tp_size": group.tp_size,
            f"node_groups.{index}.memory_fraction": group.memory_fraction,
            f"node_groups.{index}.device_gb": group.device_gb,
        }
    sections = {"kv_cache": config.kv_cache, "transport": config.transport, "api": config.api, "logs": config.logs}
    for section, struct in sections.items():
        flat |= {f"{section}.{word}": getattr(struct, word) for word in struct.__struct_fields__ if word not in UNSET}
    return flat


def differences(left: Settings, right: Settings) -> list[dict[str, Any]]:
    """Return the keys whose values differ, with both values and sources; None if a side lacks the key."""
    ours, theirs = left.values, right.values
    return [
        {
            "name": key,
            "left": ours.get(key),
            "right": theirs.get(key),
            "left_source": left.sources.get(key, "default") if key in ours else None,
            "right_source": right.sources.get(key, "default") if key in theirs else None,
        }
        for key in dict.fromkeys([*ours, *theirs])
        if ours.get(key) != theirs.get(key) or (key in ours) != (key in theirs)
    ]
