"""Configurations for people: a commented start file, and the differences of two. Used by `mstarctl config`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from mstar_core.config.key import Setting
from mstar_core.config.resolved import ResolvedConfig
from mstar_core.config.schema import values_of, words_of
from mstar_core.plugin import ModelSpec
from mstarctl.authoring.config_schema import default_shown


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


def differences(left: ResolvedConfig, right: ResolvedConfig) -> list[dict[str, Any]]:
    """Return the keys whose values differ, with both values and sources; None if a side lacks the key."""
    ours, theirs = values_of(left), values_of(right)
    return [
        {
            "name": key,
            "left": ours.get(key),
            "right": theirs.get(key),
            "left_source": left.source(key) if key in ours else None,
            "right_source": right.source(key) if key in theirs else None,
        }
        for key in dict.fromkeys([*ours, *theirs])
        if ours.get(key) != theirs.get(key) or (key in ours) != (key in theirs)
    ]
