"""A small speech model for api tests, without weights; words in the prompt make its processor misbehave."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mstar_core.errors import RequestError
from mstar_core.graph import CLIENT, KV_CACHE, GraphEdge, GraphNode, KVSpec, NodeSpec, Sampling
from mstar_core.plugin import Audio, Image, ModelSpec, Partition, ProgramRequest, Run, Text, WeightRef, param
from mstar_core.plugin.processor import Inputs, PromptRequest
from mstar_core.plugin.program import ProgramGenerator

RATE = 24000
LARGE_BYTES = 100_000
"""Size of an input that is lent in shared memory; the prompt `large` has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    voice: str = param("tara", "speaker", choices=("tara", "leo"), openai="voice")
    temperature: float = param(0.6, "0 is greedy", ge=0, le=2, openai="temperature")
    max_output_tokens: int = param(50, "ids", ge=1, le=4096)
    seed: int | None = param(None, "seed", ge=0)


def program(request: ProgramRequest) -> ProgramGenerator:
    yield Run("speak", tokens=request.inputs["tokens"])


LM = NodeSpec(
    name="LLM",
    engine=KV_CACHE,
    ports={"tokens": "i64[n]", "token": "i64[1]"},
    kv=KVSpec(layers=1, kv_heads=1, head_dim=8),
    sampling=Sampling(port="token"),
)
SPEAK = GraphNode(LM, ("tokens",), (GraphEdge("token", CLIENT, modality="text"),))

SPEC = ModelSpec(
    name="fake_speech",
    title="Fake speech",
    plugin="fake",
    aliases=("fake",),
    inputs=(Text(), Image()),
    outputs=(Audio(rate=RATE, channels=1), Text()),
    params=Params,
    routes=frozenset({"speech"}),
    nodes=(LM,),
    partitions=(Partition(name="LLM", program=program, walks={"speak": SPEAK}),),
    processor="tests.fakes.speech_model:Processor",
    weights={"official": WeightRef(repo="fake/weights")},
)


class Utf8:
    """Detokenizer whose ids are bytes; incomplete characters are held back."""

    def __init__(self) -> None:
        self._held = b""

    def push(self, ids: Sequence[int]) -> str:
        self._held += bytes(ids)
        for keep in range(4):
            cut = len(self._held) - keep
            try:
                text = self._held[:cut].decode()
            except UnicodeDecodeError:
                continue
            self._held = self._held[cut:]
            return text
        return ""

    def flush(self) -> str:
        text, self._held = self._held.decode(errors="replace"), b""
        return text


class Processor:
    """One id per byte of the text. Words in the text make it misbehave."""

    def __init__(self, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        self.kwargs = model_kwargs

    def process_prompt(self, request: PromptRequest) -> Inputs:
        text = request.text or ""
        if text == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "hang":
            time.sleep(600)
        if text == "raise":
            raise ValueError("secret /etc/path")
        if text == "unsendable":
            return Inputs(arrays={}, metadata={"audio": {"made by": lambda: text}})
        if text == "memory":
            np.ones(1 << 33, dtype=np.uint8)
        if len(text) > 1000:
            raise RequestError("the prompt is too long", field="text", code="context_length_exceeded")
        ids = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
        warnings = ["cut"] if text == "warn" else []
        arrays = {"tokens": ids} | ({"picture": np.full(LARGE_BYTES, 7, dtype=np.uint8)} if text == "large" else {})
        return Inputs(arrays=arrays, prompt_tokens=len(ids), max_output_tokens=50, warnings=warnings)

    def postprocess(self, output: np.ndarray, modality: str) -> tuple[bytes, dict[str, Any]]:
        return (output * 32767).astype("<i2").tobytes(), {}

    def detokenizer(self) -> Utf8:
        return Utf8()
