"""Small model with a text node and a sound node, whose parts can be replaced by faulty ones."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mstar_core.engine.module import NodeModule, WarmupRequest, WarmupStep
from mstar_core.errors import RequestError
from mstar_core.graph import CLIENT, STATELESS, GraphEdge, GraphNode, NodeSpec
from mstar_core.plugin import Audio, ModelSpec, Partition, ProgramRequest, Run, Sample, Text, WeightRef, param
from mstar_core.plugin.processor import Inputs, PromptRequest
from mstar_core.plugin.program import ProgramGenerator

RATE = 8000
HERE = __name__


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    volume: float = param(0.5, "loudness", ge=0, le=1)


TONE = NodeSpec(
    name="tone",
    engine=STATELESS,
    ports={"tokens": "i64[n]", "pcm": "i16[samples]"},
    batch_key=("tokens",),
    doc="sounds",
)
EDGE = (GraphEdge("pcm", CLIENT, modality="audio"),)


def program(request: ProgramRequest) -> ProgramGenerator:
    yield Run("speak", tokens=request.inputs["tokens"])
    yield Run("speak", tokens=request.inputs["tokens"])


GOOD = ModelSpec(
    name="flawless",
    title="A toy that sounds",
    plugin="flawless",
    inputs=(Text(),),
    outputs=(Audio(rate=RATE),),
    params=Params,
    nodes=(TONE,),
    partitions=(Partition(name="main", program=program, walks={"speak": GraphNode(TONE, ("tokens",), EDGE)}),),
    processor=f"{HERE}:Processor",
    model=f"{HERE}:Model",
    tiny=f"{HERE}:write",
    samples=(Sample(name="hello", inputs={"tokens": (5,)}, outputs=frozenset({"audio"})),),
    max_seq_len=64,
)


def write(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def write_nothing(folder: Path) -> None:
    """Faulty part that omits the location."""


class Processor:
    def __init__(self, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        self.calls = 0

    def process_prompt(self, request: PromptRequest) -> Inputs:
        if not request.text:
            raise RequestError("text is empty", field="text")
        ids = np.frombuffer(request.text.encode(), np.uint8).astype(np.int64)
        return Inputs(arrays={"tokens": ids}, prompt_tokens=len(ids))

    def postprocess(self, output: np.ndarray, modality: str) -> tuple[bytes, dict[str, Any]]:
        return output.astype("<i2").tobytes(), {"sample_rate": RATE, "num_channels": 1}

    def detokenizer(self) -> Any:
        return codecs.getincrementaldecoder("utf-8")()


class TakesAnything(Processor):
    def process_prompt(self, request: PromptRequest) -> Inputs:
        return Inputs(arrays={"tokens": np.ones(3, np.int64)}, prompt_tokens=3)


class Crashes(Processor):
    def process_prompt(self, request: PromptRequest) -> Inputs:
        assert request.text is not None
        return super().process_prompt(request)


class NamesNoField(Processor):
    def process_prompt(self, request: PromptRequest) -> Inputs:
        if not request.text:
            raise RequestError("text is empty")
        return super().process_prompt(request)


class WrongRate(Processor):
    def postprocess(self, output: np.ndarray, modality: str) -> tuple[bytes, dict[str, Any]]:
        return output.tobytes(), {"sample_rate": 44100}


class HeaderOnEachChunk(Processor):
    def postprocess(self, output: np.ndarray, modality: str) -> tuple[bytes, dict[str, Any]]:
        return b"RIFF" + output.tobytes(), {}


class Tone(nn.Module):
    def forward(self, tokens: Tensor) -> dict[str, Any]:
        return {"pcm": (tokens * 7).to(torch.int16)}


class LooksAtItsNeighbours(nn.Module):
    def forward(self, tokens: Tensor) -> dict[str, Any]:
        return {"pcm": (tokens * 100 * len(tokens)).to(torch.int16)}


class Chance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        self.calls += 1
        return {"pcm": (tokens + self.calls).to(torch.int16)}


class Floats(nn.Module):
    def forward(self, tokens: Tensor) -> dict[str, Any]:
        return {"pcm": tokens.float()}


class Forgets(nn.Module):
    def forward(self, tokens: Tensor) -> dict[str, Any]:
        return {"sound": (tokens * 7).to(torch.int16)}


class Warm(Tone, NodeModule):
    """Warms itself up as it should. tokens: of the warm-up; outputs: ports that it wants."""

    tokens = torch.zeros(3, dtype=torch.int64)
    outputs: tuple[str, ...] = ("pcm",)

    def warmup_requests(self) -> Sequence[WarmupRequest]:
        step = WarmupStep(inputs={"tokens": self.tokens}, outputs=self.outputs)
        return [WarmupRequest(title="a text", tokens=3, steps=(step,))]


class BatchedWarmUp(Warm):
    tokens = torch.zeros(1, 3, dtype=torch.int64)


class FloatWarmUp(Warm):
    tokens = torch.zeros(3)


class WarmUpForMore(Warm):
    outputs = ("pcm", "level")


class WarmUpThatCrashes(Tone, NodeModule):
    def warm_up(self) -> None:
        raise ValueError("no such table")


class Model:
    kind: type[nn.Module] = Tone

    def __init__(self, ctx: Any) -> None: ...

    def get_submodule(self, node: NodeSpec) -> nn.Module:
        return self.kind()

    def vocab_size(self, node: NodeSpec) -> int:
        return 0


class ForgetfulModel(Model):
    kind = Forgets


class NeighbourModel(Model):
    kind = LooksAtItsNeighbours


class ChanceModel(Model):
    kind = Chance


class FloatModel(Model):
    kind = Floats


class WarmModel(Model):
    kind = Warm


class BatchedWarmUpModel(Model):
    kind = BatchedWarmUp


class FloatWarmUpModel(Model):
    kind = FloatWarmUp


class GreedyWarmUpModel(Model):
    kind = WarmUpForMore


class CrashingWarmUpModel(Model):
    kind = WarmUpThatCrashes


WEIGHTS = {"all": WeightRef(repo="nobody/nothing")}
OTHER_WALK = {"speak": GraphNode(TONE, ("tokens",), EDGE), "never": GraphNode(TONE, ("tokens",), EDGE)}
