"""Model spec of Qwen3-Omni: text, images, sound and video in; text and speech out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mstar_core.plugin import Audio, Image, ModelSpec, Partition, Sample, Text, Video, WeightRef, hookimpl
from mstar_qwen3omni.checkpoint.sizes import read_sizes
from mstar_qwen3omni.graph import OmniGraph, Sizes, build
from mstar_qwen3omni.params import Params
from mstar_qwen3omni.program import code2wav, talker, thinker

PLUGIN_API = 1


def _ids(count: int) -> dict[str, tuple[int, ...]]:
    return {"tokens": (count,), "positions": (3, count), "talker_positions": (3, count)}


HISTORY = ("history", {"tokens": (30,), "positions": (3, 30)})
OPEN = ("text", _ids(5))
ASK = ("text", _ids(14))
HEARD = ("audio", {**_ids(26), "mel": (128, 200)})
SEEN = ("image", {**_ids(64), "pixels": (256, 1536), "grid": (1, 3)})
WATCHED = ("video", {**_ids(256), "pixels": (1024, 1536), "grid": (1, 3)})
WATCHED_AND_HEARD = ("audio_video", {**_ids(282), "pixels": (1024, 1536), "grid": (1, 3), "mel": (128, 200)})
WRITES = frozenset({"text"})
SPEAKS = frozenset({"text", "audio"})

SAMPLES = (
    Sample(name="text", segments=(HISTORY, ASK), outputs=WRITES),
    Sample(name="text, spoken", segments=(HISTORY, ASK), outputs=SPEAKS, params={"voice": "chelsie"}),
    Sample(name="audio", segments=(OPEN, HEARD, ASK), outputs=WRITES),
    Sample(name="audio, spoken", segments=(OPEN, HEARD, ASK), outputs=SPEAKS),
    Sample(name="image", segments=(OPEN, SEEN, ASK), outputs=WRITES),
    Sample(name="image and audio, spoken", segments=(OPEN, SEEN, ASK, HEARD, ASK), outputs=SPEAKS),
    Sample(name="video", segments=(OPEN, WATCHED, ASK), outputs=WRITES),
    Sample(
        name="video with sound, spoken",
        segments=(OPEN, WATCHED_AND_HEARD, ASK),
        outputs=SPEAKS,
        params={"use_audio_in_video": True},
    ),
    Sample(name="second turn, spoken", segments=(HISTORY, ASK, HISTORY, ASK), outputs=SPEAKS),
    Sample(name="load test", segments=(ASK,), outputs=WRITES, params={"ignore_eos": True, "max_output_tokens": 64}),
    Sample(name="one token", segments=(ASK,), outputs=SPEAKS, params={"max_output_tokens": 1, "talker_max_tokens": 1}),
)


def spec(sizes: Sizes) -> ModelSpec:
    """Return the spec for a checkpoint of these sizes."""
    graph = build(sizes)
    return ModelSpec(
        name="qwen3_omni",
        title="Qwen3-Omni 30B-A3B: understands text, images, sound and video; writes and speaks",
        plugin="qwen3_omni",
        aliases=("qwen3omni", "qwen3-omni"),
        inputs=(Text(), Image(), Audio(rate=16000, channels=1), Video()),
        outputs=(Text(), Audio(rate=24000, channels=1)),
        params=Params,
        routes=frozenset({"chat", "speech", "transcription"}),
        nodes=graph.nodes,
        streams=graph.streams,
        partitions=_partitions(graph),
        bind=bind,
        configs="mstar_qwen3omni:configs",
        default_config="qwen3omni_2gpu",
        weights={
            "omni": WeightRef(repo="Qwen/Qwen3-Omni-30B-A3B-Instruct", files=("*.json", "merges.txt", "*.safetensors"))
        },
        requires={"vram_gib": 80, "compute_capability": "8.0"},
        max_seq_len=32768,
        samples=SAMPLES,
    )


def _partitions(graph: OmniGraph) -> tuple[Partition, ...]:
    return (
        Partition(name="Thinker", program=thinker, walks=graph.thinker),
        Partition(name="Talker", program=talker, walks=graph.talker, wants="audio"),
        Partition(name="Code2Wav", program=code2wav, walks=graph.code2wav, wants="audio"),
    )


def bind(given: ModelSpec, folder: Path | None, model_kwargs: Mapping[str, Any]) -> ModelSpec:
    """Bind the spec to the sizes and special ids of the checkpoint in `folder`."""
    if folder is None:
        return given
    graph = build(read_sizes(folder))
    return replace(given, nodes=graph.nodes, streams=graph.streams, partitions=_partitions(graph))


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    return [spec(Sizes())]
