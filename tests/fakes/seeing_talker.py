"""A model that sees an image, writes and speaks, without weights: its nodes take virtual time, and nothing else.

A thinker reads the image and writes text; a talker reads the prompt too and makes frames from the first id of text on;
a codec turns frames into sound. Times of steps are near those of Qwen3-Omni in its official shapes on one GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mstar_core.conformance.clock import FakeClock
from mstar_core.conformance.nodes import BuiltNode
from mstar_core.graph import (
    CLIENT,
    KV_CACHE,
    STATELESS,
    FixedChunk,
    GraphEdge,
    GraphNode,
    KVSpec,
    LeftContext,
    Loop,
    NodeSpec,
    Sampling,
    Sequential,
    Stream,
    StreamingGraphEdge,
)
from mstar_core.plugin import Audio, Image, ModelSpec, Partition, ProgramRequest, Run, Text, param
from mstar_core.plugin.processor import Inputs, PromptRequest, SegmentInputs
from mstar_core.plugin.program import ProgramGenerator
from tests.fakes.speech_model import Utf8

FRAME_S = 0.08
FRAME_VALUES = 10
FIRST, CHUNK = 8, 25
IMAGE_TOKENS, TEXT_TOKENS = 576, 24
WIDTH, VOCAB = 2, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    words: int = param(24, "ids of text", ge=2)
    frames: int = param(57, "frames of sound", ge=2)


VISION = NodeSpec(
    name="vision", engine=STATELESS, ports={"pixels": "f32[p]", "embeds": f"f32[n,{WIDTH}]"}, ragged=("pixels",)
)
THINKER = NodeSpec(
    name="Thinker",
    engine=KV_CACHE,
    ports={"tokens": "i64[n]", "embeds": f"f32[n,{WIDTH}]?", "token": "i64[1]"},
    kv=KVSpec(layers=1, kv_heads=1, head_dim=2),
    sampling=Sampling(port="token", vocab=VOCAB),
    sequence=("tokens", "token"),
)
TALKER = NodeSpec(
    name="Talker",
    engine=KV_CACHE,
    ports={"tokens": "i64[n]?", "text": "i64[n]", "code": "i64[1]"},
    kv=KVSpec(layers=1, kv_heads=1, head_dim=2),
    sampling=Sampling(port="code", vocab=VOCAB),
    sequence=("tokens", "text", "code"),
)
CODEC = NodeSpec(name="codec", engine=STATELESS, ports={"codes": "i64[n]", "pcm": "f32[s]"}, batch_key=("codes",))
TEXT = Stream("text", into=(TALKER, "text"), chunk=FixedChunk(1))
CODES = Stream("codes", into=(CODEC, "codes"), chunk=LeftContext(CHUNK, CHUNK, first=FIRST))
WORD = (GraphEdge("token", CLIENT, modality="text"), StreamingGraphEdge("token", TEXT))
CODE = (StreamingGraphEdge("code", CODES),)


def thinker(request: ProgramRequest) -> ProgramGenerator:
    *seen, asked = request.segments
    looks = [Run("see", sample=False, pixels=each.inputs["pixels"], tokens=each.inputs["tokens"]) for each in seen]
    yield [*looks, Run("read", tokens=asked.inputs["tokens"]), Run("write", max_iters=request.params.words - 1)]


def talker(request: ProgramRequest) -> ProgramGenerator:
    heard = [Run("listen", sample=False, tokens=segment.inputs["tokens"]) for segment in request.segments]
    yield [*heard, Run("open"), Run("speak", max_iters=request.params.frames - 1)]


def codec(request: ProgramRequest) -> ProgramGenerator:
    yield Run("sound")


SPEC = ModelSpec(
    name="seeing_talker",
    title="Seeing talker",
    plugin="fake",
    inputs=(Text(), Image()),
    outputs=(Text(), Audio(rate=int(FRAME_VALUES / FRAME_S))),
    params=Params,
    nodes=(VISION, THINKER, TALKER, CODEC),
    streams=(TEXT, CODES),
    partitions=(
        Partition(
            name="Thinker",
            program=thinker,
            walks={
                "see": Sequential(
                    GraphNode(VISION, ("pixels",), (GraphEdge("embeds", THINKER),)),
                    GraphNode(THINKER, ("tokens", "embeds"), WORD),
                ),
                "read": GraphNode(THINKER, ("tokens",), WORD),
                "write": Loop("write", GraphNode(THINKER, ("token",), WORD), carry={"token": "token"}),
            },
        ),
        Partition(
            name="Talker",
            program=talker,
            wants="audio",
            walks={
                "listen": GraphNode(TALKER, ("tokens",), CODE),
                "open": GraphNode(TALKER, ("text",), CODE),
                "speak": Loop("speak", GraphNode(TALKER, ("code",), CODE), carry={"code": "code"}),
            },
        ),
        Partition(
            name="Codec",
            program=codec,
            wants="audio",
            walks={
                "sound": Loop(
                    "chunks", GraphNode(CODEC, ("codes",), (GraphEdge("pcm", CLIENT, modality="audio"),)), over=CODES
                )
            },
        ),
    ),
)


class Processor:
    """Reads a text of any length as a few ids, and each medium as an image."""

    def process_prompt(self, request: PromptRequest) -> Inputs:
        ids = np.ones(TEXT_TOKENS, dtype=np.int64)
        image = {"pixels": np.zeros(4 * IMAGE_TOKENS, np.float32), "tokens": np.ones(IMAGE_TOKENS, np.int64)}
        segments = [SegmentInputs(kind="image", arrays=image, length=IMAGE_TOKENS) for _ in request.media]
        segments.append(SegmentInputs(kind="text", arrays={"tokens": ids}, length=TEXT_TOKENS))
        return Inputs(segments=segments, prompt_tokens=sum(segment.length for segment in segments))

    def postprocess(self, output: np.ndarray, modality: str) -> tuple[bytes, dict[str, Any]]:
        return output.tobytes(), {}

    def detokenizer(self) -> Utf8:
        return Utf8()


@dataclass
class Device:
    """The one device of all nodes: a step takes its time. steps: (node, tokens or items, time) of all of them."""

    clock: FakeClock = field(default_factory=FakeClock)
    steps: list[tuple[str, int, float]] = field(default_factory=list)

    def run(self, node: str, size: int, base_s: float, each_s: float) -> None:
        self.steps.append((node, size, round(self.clock.now, 9)))
        self.clock.sleep(base_s + each_s * size)


class Language(nn.Module):
    """A language model without layers."""

    def __init__(self, device: Device, name: str, base_s: float, each_s: float) -> None:
        super().__init__()
        self._run: Callable[[int], None] = lambda tokens: device.run(name, tokens, base_s, each_s)

    def forward(self, kv: Any, positions: Tensor, **ports: Tensor) -> dict[str, Tensor]:
        self._run(len(positions))
        return {"hidden": torch.zeros(len(positions), WIDTH)}

    def head(self, hidden: Tensor) -> Tensor:
        return torch.zeros(len(hidden), VOCAB)


class Vision(nn.Module):
    """6 ms per image and 2 ms per step."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def forward(self, pixels: Tensor) -> dict[str, Any]:
        self._device.run("vision", len(pixels), 0.002, 0.006)
        return {"embeds": torch.zeros(len(pixels), IMAGE_TOKENS, WIDTH)}


class Codec(nn.Module):
    """Sound of the newest frames of each window."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def forward(self, codes: Tensor) -> dict[str, Tensor]:
        count, frames = codes.shape
        self._device.run("codec", count, 0.003, 0.0005)
        return {"pcm": torch.zeros(count, FRAME_VALUES * min(frames, CHUNK))}


def build(device: Device) -> dict[str, BuiltNode]:
    """Return the nodes of the model on a device."""
    modules: dict[str, tuple[NodeSpec, nn.Module, int]] = {
        "vision": (VISION, Vision(device), 0),
        "Thinker": (THINKER, Language(device, "Thinker", 0.011, 15e-6), VOCAB),
        "Talker": (TALKER, Language(device, "Talker", 0.005, 6e-6), VOCAB),
        "codec": (CODEC, Codec(device), 0),
    }
    return {name: BuiltNode(node=node, module=module, vocab=vocab) for name, (node, module, vocab) in modules.items()}
