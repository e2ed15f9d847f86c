"""A tiny omni model: a writer's ids feed a speaker, whose frames feed a codec. The engine tests have its modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mstar_core.graph import (
    CLIENT,
    RANDOM,
    STATELESS,
    Attend,
    FixedChunk,
    GraphEdge,
    GraphNode,
    LeftContext,
    Loop,
    NodeSpec,
    StopOn,
    Stream,
    StreamingGraphEdge,
    from_param,
)
from mstar_core.plugin import Audio, ModelSpec, Partition, ProgramRequest, Run, Text, param
from mstar_core.plugin.model import ModelContext
from mstar_core.plugin.processor import Inputs, PromptRequest
from mstar_core.plugin.program import ProgramGenerator
from tests.engine.tiny_engine import LM, VOCAB, WIDTH, TinyLM
from tests.engine.tiny_talker import GROUPS, OPENING, TALKER, TinyTalker
from tests.fakes.speech_model import Utf8

STOP = 44
LAST_CODE = 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    temperature: float = param(0.0, "of text", ge=0, le=2)
    talker_temperature: float = param(0.8, "of codes", ge=0, le=2)
    heat: float = param(1.0, "of the residual codes", gt=0, le=2)
    voice: int = param(1, "speaker", ge=0, le=3)
    words: int = param(12, "ids of the answer", ge=1)
    frames: int = param(16, "frames of the speech", ge=1)
    first: int = param(2, "frames of the first piece", ge=1)


WRITER = replace(
    LM, name="writer", ports={"tokens": "i64[n]", "token": "i64[1]"}, kv=replace(LM.kv, branches=("main",))
)  # type: ignore[type-var]
SPEAKER = replace(TALKER, name="speaker")
CODEC = NodeSpec(name="codec", engine=STATELESS, ports={"codes": f"i64[n,{GROUPS}]", "pcm": "i16[s]"})
TEXT = Stream("text", into=(SPEAKER, "text"), chunk=FixedChunk(1, after_end="empty"), reject=(STOP,))
CODES = Stream("codes", into=(CODEC, "codes"), chunk=LeftContext(chunk=4, left=0, first_from="first"))
SOUND = (GraphEdge("pcm", CLIENT, modality="audio"),)
WORD = (GraphEdge("token", CLIENT, modality="text"), StreamingGraphEdge("token", TEXT))


def writer(request: ProgramRequest) -> ProgramGenerator:
    yield [Run("read", tokens=request.inputs["tokens"]), Run("write", max_iters=request.params.words - 1)]


def speaker(request: ProgramRequest) -> ProgramGenerator:
    yield [Run("open"), Run("speak", max_iters=request.params.frames, bias=request.inputs["bias"])]


def codec(request: ProgramRequest) -> ProgramGenerator:
    yield Run("sound")


SPEC = ModelSpec(
    name="fake_talk",
    title="Fake talk",
    plugin="fake",
    inputs=(Text(),),
    outputs=(Text(), Audio(rate=24000, channels=1)),
    params=Params,
    routes=frozenset({"chat"}),
    nodes=(WRITER, SPEAKER, CODEC),
    streams=(TEXT, CODES),
    partitions=(
        Partition(
            name="writer",
            program=writer,
            walks={
                "read": GraphNode(WRITER, ("tokens",), WORD),
                "write": Loop(
                    "write",
                    GraphNode(WRITER, ("token",), WORD),
                    carry={"token": "token"},
                    stop=StopOn("token", (STOP,)),
                ),
            },
        ),
        Partition(
            name="speaker",
            program=speaker,
            wants="audio",
            walks={
                "open": GraphNode(SPEAKER, ("text", from_param("voice")), attend=Attend(tokens=OPENING)),
                "speak": Loop(
                    "speak",
                    GraphNode(
                        SPEAKER,
                        ("code0", "text", "last_hidden", "text_ended", RANDOM, from_param("heat"), "bias"),
                        (StreamingGraphEdge("frame", CODES),),
                        attend=Attend(tokens=1),
                    ),
                    over=TEXT,
                    stop=StopOn("code0", (LAST_CODE,)),
                    carry={"code0": "code0", "last_hidden": "last_hidden", "text_ended": "text_ended"},
                ),
            },
        ),
        Partition(
            name="codec",
            program=codec,
            wants="audio",
            walks={"sound": Loop("sound", GraphNode(CODEC, ("codes",), SOUND), over=CODES)},
        ),
    ),
    processor="tests.fakes.talk_model:Processor",
    model="tests.fakes.talk_model:Model",
)


class Processor:
    """One id per byte of the text; ids of the vocabulary."""

    def __init__(self, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        pass

    def process_prompt(self, request: PromptRequest) -> Inputs:
        ids = np.frombuffer((request.text or "").encode(), dtype=np.uint8).astype(np.int64) % VOCAB
        heat = float(request.params.heat)
        bias = torch.linspace(-heat, heat, WIDTH).numpy()
        return Inputs(arrays={"tokens": ids, "bias": bias}, prompt_tokens=len(ids))

    def postprocess(self, output: np.ndarray, modality: str) -> tuple[bytes, dict[str, Any]]:
        return output.astype("<i2").tobytes(), {}

    def detokenizer(self) -> Utf8:
        return Utf8()


class Codec(nn.Module):
    """Sound whose samples are the codes."""

    def forward(self, codes: Tensor) -> dict[str, Tensor]:
        return {"pcm": codes.reshape(*codes.shape[:-2], -1).to(torch.int16)}


class Model:
    """Builds the modules of the engine tests."""

    def __init__(self, ctx: ModelContext) -> None:
        pass

    def get_submodule(self, node: NodeSpec) -> nn.Module:
        match node.name:
            case "writer":
                return TinyLM()
            case "speaker":
                return TinyTalker()
            case _:
                return Codec()

    def vocab_size(self, node: NodeSpec) -> int:
        return VOCAB if node.sampling is not None else 0
