"""Bronze checks: a miniature serves every walk, and its outputs match the spec."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from mstar_core.conformance.miniature import Miniature, miniature
from mstar_core.errors import PluginError
from mstar_core.graph import GraphEdge, PortType, graph_nodes, loops
from mstar_core.plugin.conformance import Subject
from mstar_core.plugin.surface import EVENTS, Action, Audio

if TYPE_CHECKING:
    from mstar_core.api.output.encode import EncodedChunk
    from mstar_core.api.output.units import OutputItem
    from mstar_core.conformance.fake_api import RequestOutcome

SIGNATURES: Final = {
    "image": (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF"),
    "video": (b"\x00\x00\x00", b"\x1aE\xdf\xa3", b"RIFF"),
}
"""First bytes of files: PNG, JPEG or WebP; MP4, Matroska or AVI."""

NUMPY_NAMES: Final = {
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "u8": "uint8",
    "bool": "bool",
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "uint16",
}


def serves_every_walk(subject: Subject) -> None:
    """Run every sample to its end; together they must take every walk."""
    small = miniature(subject)
    missed = sorted(small.walks.difference(*(small.served_alone(ask).walks for ask in small.asks)))
    if missed:
        raise PluginError(f"no sample took walk {', '.join(missed)}", hint="add a Sample that does, or delete the walk")


def outputs_as_declared(subject: Subject) -> None:
    """Check each value against its port and each encoding against its modality; every modality must occur."""
    small = miniature(subject)
    ports = _ports(small)
    produced: set[str] = set()
    accepted: set[str] = set()
    for ask in small.asks:
        outcome = small.alone(ask)
        for item in outcome.items:
            _check_item(small, item, ports, ask.name)
        for chunk in outcome.chunks:
            _check_chunk(small, chunk, ask.name)
        _check_whole(outcome, ask.name)
        gives = {modality for modality, data in outcome.outputs.items() if data and modality not in EVENTS}
        produced |= gives
        accepted |= set(ask.outputs) if gives else set()  # a client may request more than the walk produces
        unasked = set(outcome.outputs) - set(ask.outputs) if ask.outputs else set()
        if unasked:
            raise PluginError(f"{ask.name} received {', '.join(sorted(unasked))}, which it did not request")
    missed = [modality.kind for modality in small.spec.outputs if modality.kind not in produced | accepted]
    if missed:
        raise PluginError(
            f"no sample produced {', '.join(missed)}", hint="add a Sample that does, or do not declare it"
        )


def _ports(small: Miniature) -> dict[str, list[PortType]]:
    """Collect the types of the ports whose values go to the client."""
    types: dict[str, list[PortType]] = {}
    for partition in small.spec.partitions:
        for walk in partition.walks.values():
            for use in graph_nodes(walk):
                named = [edge.port for edge in use.outputs if isinstance(edge, GraphEdge)]
                named += [edge.port for loop in loops(walk) for edge in loop.outputs if isinstance(edge, GraphEdge)]
                for port in named:
                    if port in use.spec.ports:
                        types.setdefault(port, []).append(PortType.parse(use.spec.ports[port]))
    return types


def _check_item(small: Miniature, item: OutputItem, ports: dict[str, list[PortType]], name: str) -> None:
    if small.spec.output(item.modality) is None and item.modality not in EVENTS:
        raise PluginError(f"{name} produced {item.modality}, which the model does not declare")
    allowed = ports.get(item.port, [])
    has_rows = any(node.kv is not None and node.kv.rows for node in small.spec.nodes)
    if allowed and not any(_fits(kind, item, has_rows) for kind in allowed):
        raise PluginError(
            f"{name}: port {item.port} produced {item.array.dtype.name}{list(item.array.shape)}",
            f"it is declared as {' or '.join(sorted({str(kind) for kind in allowed}))}",
            "declare the type that the node produces",
        )
    declared = small.spec.output(item.modality)
    if isinstance(declared, Action):
        sizes = (declared.horizon, declared.dim)
        shape = item.array.shape[-2:]
        if len(shape) != 2 or any(size is not None and size != got for size, got in zip(sizes, shape, strict=True)):
            raise PluginError(
                f"{name} produced an action of shape {list(item.array.shape)}", f"declared is {list(sizes)}"
            )


def _fits(kind: PortType, item: OutputItem, has_rows: bool) -> bool:
    """Return whether a value matches a port type.

    has_rows: requests of this model may have several candidates, on a leading axis that the types do not show.
    """
    dtype = NUMPY_NAMES.get(kind.dtype)
    if dtype is not None and dtype != item.array.dtype.name:
        return False
    if not kind.shape:
        return True
    shape = item.array.shape
    if has_rows and len(shape) == len(kind.shape) + 1:
        shape = shape[1:]
    return len(shape) == len(kind.shape) and all(
        isinstance(size, str) or size == actual for size, actual in zip(kind.shape, shape, strict=True)
    )


def _check_chunk(small: Miniature, chunk: EncodedChunk, name: str) -> None:
    declared = small.spec.output(chunk.modality)
    if isinstance(declared, Audio):
        facts = {"sample_rate": declared.rate, "num_channels": declared.channels}
        for key, value in facts.items():
            if chunk.metadata.get(key, value) != value:
                raise PluginError(f"{name}: {key} is {chunk.metadata[key]}", f"the spec declares {value}")
        if len(chunk.data) % (2 * declared.channels):
            raise PluginError(
                f"{name}: {len(chunk.data)} bytes are not a whole number of 16-bit samples of all channels"
            )
    if "dtype" in chunk.metadata and "shape" in chunk.metadata:
        size = math.prod(chunk.metadata["shape"]) * np.dtype(chunk.metadata["dtype"]).itemsize
        if len(chunk.data) != size:
            raise PluginError(f"{name}: {len(chunk.data)} bytes of {chunk.modality}", f"its metadata says {size}")
        return  # raw numbers under a media modality, as earlier clients request them
    begins = SIGNATURES.get(chunk.modality)
    if begins is not None and not chunk.data.startswith(begins):
        raise PluginError(f"{name}: {chunk.modality} begins with {chunk.data[:4]!r}", "not a known file type")


def _check_whole(outcome: RequestOutcome, name: str) -> None:
    text = outcome.outputs.get("text")
    if text is None:
        return
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PluginError(f"{name}: the text is not UTF-8", str(error)) from error
