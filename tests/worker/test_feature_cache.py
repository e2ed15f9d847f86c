"""Equal media are encoded once per rank: through the conductor and a worker, and the cache alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mstar_core.conformance.fake_api import SampleRequest
from mstar_core.conformance.nodes import BuiltNode, RuntimeSettings
from mstar_core.conformance.runtime import LocalRuntime
from mstar_core.graph import CLIENT, STATELESS, GraphEdge, GraphNode, NodeSpec, Sequential, from_param
from mstar_core.plugin import Image, ModelSpec, Partition, ProgramRequest, Run, TensorData, param
from mstar_core.plugin.processor import Inputs, MediaPart, PromptRequest, SegmentInputs, content_key
from mstar_core.plugin.program import ProgramGenerator
from mstar_core.worker.state.feature_cache import Feature, FeatureCache
from tests.fakes.speech_model import Utf8

ENCODER = NodeSpec(name="encoder", engine=STATELESS, ports={"pixels": "f32[p]", "gain": "f32", "features": "f32[p]"})
SUM = NodeSpec(name="sum", engine=STATELESS, ports={"features": "f32[p]", "total": "f32[1]"})
LOOK = Sequential(
    GraphNode(ENCODER, ("pixels", from_param("gain")), (GraphEdge("features", SUM),)),
    GraphNode(SUM, ("features",), (GraphEdge("total", CLIENT, modality="tensor"),)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    gain: float = param(2.0, "factor of the pixels", ge=0)
    seed: int | None = param(None, "seed", ge=0)


def program(request: ProgramRequest) -> ProgramGenerator:
    yield [Run("look", pixels=segment) for segment in request.segments]


class Processor:
    """One segment per file. A file that begins with `?` has no content key."""

    def __init__(self, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        pass

    def process_prompt(self, request: PromptRequest) -> Inputs:
        segments = []
        for part in request.media:
            key = b"" if part.data.startswith(b"?") else content_key(part.data, "float32")
            pixels = np.frombuffer(part.data, dtype=np.uint8).astype(np.float32)
            segments.append(SegmentInputs(kind="image", arrays={"pixels": pixels}, length=1, content=key))
        return Inputs(arrays={}, segments=segments, prompt_tokens=1)

    def postprocess(self, output: np.ndarray, modality: str) -> tuple[bytes, dict[str, Any]]:
        return output.tobytes(), {}

    def detokenizer(self) -> Utf8:
        return Utf8()


class Encoder(nn.Module):
    """Multiplies pixels. runs: number of forward passes of one input each."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, pixels: Tensor, gain: Tensor) -> dict[str, Tensor]:
        self.runs += len(pixels)
        return {"features": pixels * gain.reshape(-1, *(1 for _ in pixels.shape[1:]))}


class Sum(nn.Module):
    def forward(self, features: Tensor) -> dict[str, Tensor]:
        return {"total": features.sum(dim=-1, keepdim=True)}


SPEC = ModelSpec(
    name="fake_look",
    title="Fake look",
    plugin="fake",
    inputs=(Image(max_count=4),),
    outputs=(TensorData(),),
    params=Params,
    routes=frozenset(),
    nodes=(ENCODER, SUM),
    partitions=(Partition(name="look", program=program, walks={"look": LOOK}),),
)


def bench(**settings: Any) -> tuple[LocalRuntime, Encoder]:
    module = Encoder()
    built = {
        "encoder": BuiltNode(node=ENCODER, module=module, vocab=0),
        "sum": BuiltNode(node=SUM, module=Sum(), vocab=0),
    }
    made = LocalRuntime(SPEC, Path(), RuntimeSettings(**settings), built=built, processor=Processor(None, {}))
    return made, module


def ask(runtime: LocalRuntime, *files: bytes, gain: float = 2.0) -> list[float]:
    media = [MediaPart(modality="image", data=data) for data in files]
    outcome = runtime.ask(SampleRequest(media=media, outputs=("tensor",), params={"gain": gain}))[0]
    assert outcome.status == "finished", outcome.cause
    assert runtime.leaks() == []
    return [float(value.reshape(-1)[0]) for value in outcome.of("total")]


def test_equal_media_are_encoded_once() -> None:
    runtime, encoder = bench()
    assert ask(runtime, b"abc", b"de", b"abc") == [588.0, 402.0, 588.0] and encoder.runs == 2
    assert ask(runtime, b"de") == [402.0] and encoder.runs == 2
    cache = runtime.workers[0].executor.features
    assert (cache.hits, cache.misses, cache.used_bytes) == (4, 4, 28), "the encoder's outputs, and the sum's of them"
    assert cache.counters() == {"feature_hits": 4, "feature_misses": 4, "feature_bytes": 28}


def test_another_parameter_of_the_node_is_another_result() -> None:
    runtime, encoder = bench()
    assert [ask(runtime, b"abc", gain=gain) for gain in (2.0, 3.0, 2.0)] == [[588.0], [882.0], [588.0]]
    assert encoder.runs == 2


def test_another_salt_shares_nothing() -> None:
    runtime, encoder = bench()
    for salt in (b"a", b"b", b"a"):
        runtime.api.salt = salt
        assert ask(runtime, b"abc") == [588.0]
    assert encoder.runs == 2


def test_without_a_content_key_nothing_is_kept() -> None:
    runtime, encoder = bench()
    assert ask(runtime, b"?bc") == ask(runtime, b"?bc") and encoder.runs == 2
    assert runtime.workers[0].executor.features.counters() == {}


def test_a_limit_of_zero_keeps_nothing() -> None:
    runtime, encoder = bench(feature_cache_bytes=0)
    assert ask(runtime, b"abc") == ask(runtime, b"abc") == [588.0] and encoder.runs == 2


def feature(name: str) -> Feature:
    return name, (), b""


def test_the_least_recently_used_entry_goes_first() -> None:
    cache = FeatureCache(100)
    for name in "abc":
        cache.put(feature(name), {"x": torch.zeros(12)})  # 48 bytes
        if name == "b":
            assert cache.find(feature("a")) is not None
    assert [cache.find(feature(name)) is not None for name in "abc"] == [True, False, True] and cache.used_bytes == 96
    cache.put(feature("large"), {"x": torch.zeros(26)})
    assert cache.find(feature("large")) is None and cache.used_bytes == 96


def test_entries_own_their_memory() -> None:
    cache, buffer = FeatureCache(100), torch.ones(4)
    cache.put(feature("a"), {"x": buffer[:2]})
    buffer.zero_()
    found = cache.find(feature("a"))
    assert found is not None and found["x"].tolist() == [1.0, 1.0]


def test_content_keys_tell_parts_apart() -> None:
    keys = {content_key(*parts) for parts in ((b"ab",), (b"a", b"b"), ("ab",), (b"ab", 1), (b"ab", 1.0), (b"ab", True))}
    assert len(keys) == 6 and all(len(key) == 16 for key in keys)
