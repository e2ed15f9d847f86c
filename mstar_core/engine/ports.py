"""Ports of KV nodes that the engine knows by name, and what their declared types say. Used by scheduler and runner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from mstar_core.graph.declare.nodes import PortType, keyword

if TYPE_CHECKING:
    from mstar_core.graph.compile.resident import LoopPorts
    from mstar_core.graph.declare.nodes import NodeSpec

POSITIONS: Final = "positions"
"""Port with the positions where `Attend.positions` is `given`; tokens on its last axis."""

DTYPES: Final = {
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "u8": torch.uint8,
    "b8": torch.bool,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
}


def id_port(spec: NodeSpec) -> str:
    """Return the keyword of ids in the module's forward: `tokens` if the node has that port, else the sampled port."""
    if "tokens" in spec.ports or spec.sampling is None:
        return "tokens"
    return spec.sampling.port


def position_dtype(spec: NodeSpec) -> torch.dtype:
    """Return the dtype of positions at a node: float32 if its `positions` port declares floats, else int64.

    Positions are exact up to 2 ** 24 in float32; bfloat16 would merge them from 256 on.
    """
    declared = PortType.parse(spec.ports[POSITIONS]).dtype if POSITIONS in spec.ports else "i64"
    return torch.int64 if declared.startswith("i") else torch.float32


def fixed_ranks(spec: NodeSpec) -> dict[str, int]:
    """Return the ranks of ports whose types declare every dimension as a number: one value per sequence."""
    shapes = {name: PortType.parse(text).shape for name, text in spec.ports.items()}
    return {name: len(shape) for name, shape in shapes.items() if shape and all(isinstance(n, int) for n in shape)}


def value_forms(spec: NodeSpec, ports: LoopPorts, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of one sequence's value of each carried or constant port, by keyword."""
    forms = {}
    for name in (*(into for into, _ in ports.states), *ports.constants):
        kind = spec.port(keyword(name))
        forms[keyword(name)] = tuple(int(size) for size in kind.shape), DTYPES.get(kind.dtype, dtype)
    return forms
