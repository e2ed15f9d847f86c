"""Model spec of Qwen3-Omni: text, images, sound and video in; text and speech out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mstar_core.plugin import (
    Audio,
    Image,
    ModelSpec,
    Partition,
    Sample,
    Surface,
    TensorData,
    Text,
    Video,
    WeightRef,
    WorkloadSpec,
    hookimpl,
)
from mstar_core.plugin.chat.format import HERMES, ChatFormat
from mstar_qwen3omni.checkpoint.config import OmniConfig, read_config
from mstar_qwen3omni.graph import OmniGraph, build
from mstar_qwen3omni.params import Params
from mstar_qwen3omni.program import code2wav, talker, thinker

PLUGIN_API = 1


def _seen(count: int) -> dict[str, tuple[int, ...]]:
    return {"tokens": (count,), "positions": (3, count), "talker_positions": (3, count), "grid": (3,)}


TURNS = ("text", {"tokens": (44,), "talker_tokens": (14,)})
OPEN = ("text", {"tokens": (35,), "talker_tokens": (5,)})
ASK = ("text", {"tokens": (14,), "talker_tokens": (14,)})
HEARD = ("audio", {"tokens": (26,), "audio": (1, 32000)})
SEEN = ("image", {**_seen(64), "pixels": (256, 256, 3)})
WATCHED = ("video", {**_seen(256), "pixels": (1024, 1536)})
WATCHED_AND_HEARD = (
    "audio_video",
    {"tokens": (282,), "positions": (3, 282), "grid": (3,), "pixels": (1024, 1536), "audio": (1, 32000)},
)
HEARD_LATER = ("audio", {**HEARD[1], "positions": (3, 26)})
ASK_LATER = ("text", {"tokens": (14,), "talker_tokens": (14,), "positions": (3, 14)})
WRITES = frozenset({"text"})
SPEAKS = frozenset({"text", "audio"})

FEW = {"talker_max_tokens": 12}
"""Limit of speech in conformance checks, which repeat a sample many times: two pieces of sound."""

SAMPLES = (
    Sample(name="text", segments=(TURNS,), outputs=WRITES),
    Sample(name="text, spoken", segments=(TURNS,), outputs=SPEAKS, params={"voice": "chelsie"}, tiny=FEW),
    Sample(name="audio", segments=(OPEN, HEARD, ASK), outputs=WRITES),
    Sample(name="audio, spoken", segments=(OPEN, HEARD, ASK), outputs=SPEAKS, tiny=FEW),
    Sample(name="image", segments=(OPEN, SEEN, ASK), outputs=WRITES),
    Sample(name="image and audio, spoken", segments=(OPEN, SEEN, ASK, HEARD, ASK), outputs=SPEAKS, tiny=FEW),
    Sample(name="video", segments=(OPEN, WATCHED, ASK), outputs=WRITES),
    Sample(
        name="video with sound, spoken",
        segments=(OPEN, WATCHED_AND_HEARD, ASK_LATER),
        outputs=SPEAKS,
        params={"use_audio_in_video": True},
        files=("video", "text"),
        # A wide frame, whose positions go beyond those of its sound.
        tiny={**FEW, "fps": 1.0, "video_min_pixels": 300_000},
    ),
    Sample(
        name="audio after a video with sound",
        segments=(OPEN, WATCHED_AND_HEARD, ASK_LATER, HEARD_LATER, ASK),
        outputs=WRITES,
        params={"use_audio_in_video": True},
        files=("video", "audio", "text"),
        tiny={"max_frames": 2, "video_min_pixels": 300_000, "max_output_tokens": 3},
    ),
    Sample(name="second turn, spoken", segments=(TURNS, ASK), outputs=SPEAKS, tiny=FEW),
    Sample(name="load test", segments=(ASK,), outputs=WRITES, params={"ignore_eos": True, "max_output_tokens": 64}),
    Sample(name="one token", segments=(ASK,), outputs=SPEAKS, params={"max_output_tokens": 1, "talker_max_tokens": 1}),
)


FRAMES_PER_S = 100
"""Mel frames of a second of sound."""

WRITTEN = frozenset({"chat", "completion", "tokenize", "transcription"})
"""Routes of a checkpoint that does not speak."""


def _media_values(config: OmniConfig) -> dict[str, dict[str, int | tuple[int, ...]]]:
    """Return grids and pads of the media in SAMPLES, which the vision encoder checks."""
    ids = config.ids
    both = (ids.video_pad,) * WATCHED[1]["tokens"][0] + (ids.audio_pad,) * HEARD[1]["tokens"][0]
    return {
        "image": {"grid": (1, 16, 16), "tokens": ids.image_pad},
        "video": {"grid": (4, 16, 16), "tokens": ids.video_pad},
        "audio_video": {"grid": (4, 16, 16), "tokens": both},
    }


CHAT = ChatFormat(tools=HERMES)
"""Calls as the checkpoint's template shows them. The instruct model does not think."""


def spec(config: OmniConfig) -> ModelSpec:
    """Return the spec for a checkpoint."""
    graph, warm = build(config), _media_values(config)
    return ModelSpec(
        name="qwen3_omni",
        title="Qwen3-Omni 30B-A3B: understands text, images, sound and video; writes and speaks",
        plugin="qwen3_omni",
        aliases=("qwen3omni", "qwen3-omni"),
        inputs=(
            Text(),
            Image(),
            Audio(rate=16000, channels=1, window_s=config.audio.window / FRAMES_PER_S),
            Video(),
            TensorData(),
        ),
        outputs=(Text(), Audio(rate=24000, channels=1, token_loop="talker_loop")) if config.has_speech else (Text(),),
        params=Params,
        routes=WRITTEN | {"speech"} if config.has_speech else WRITTEN,
        surfaces={
            "transcription": Surface(
                params={"temperature": 0.0},
                instruction="Write down the {language} speech of this recording, word for word.",
                instruction_without_language="Write down the speech of this recording, word for word.",
            )
        },
        chat=CHAT,
        nodes=graph.nodes,
        streams=graph.streams,
        partitions=_partitions(graph),
        processor="mstar_qwen3omni.processor:Processor",
        model="mstar_qwen3omni.model:Qwen3Omni",
        bind=bind,
        configs="mstar_qwen3omni:configs",
        default_config="qwen3omni_2gpu",
        weights={
            "omni": WeightRef(repo="Qwen/Qwen3-Omni-30B-A3B-Instruct", files=("*.json", "merges.txt", "*.safetensors"))
        },
        requires={"vram_gib": 80, "compute_capability": "8.0"},
        max_seq_len=32768,
        samples=tuple(replace(sample, values=warm) for sample in SAMPLES),
        tiny="mstar_qwen3omni.sources.tiny:write_tiny",
        make_samples="mstar_qwen3omni.sample_inputs:make_samples",
        mini="mstar_qwen3omni.checkpoint.shipped:find_mini",
        resolve="mstar_qwen3omni.sources.download:resolve_weights",
        notice="qwen3_omni:tiny has random weights: its text and sound are noise",
        mini_prompt="How many shapes are there?",
        mini_config="qwen3omni_single_gpu",
        mini_notice="qwen3_omni:mini is a miniature of 1.5M parameters: it answers questions about shapes and digits",
    )


def _partitions(graph: OmniGraph) -> tuple[Partition, ...]:
    written = Partition(name="Thinker", program=thinker, walks=graph.thinker)
    if not graph.talker:
        return (written,)
    spoken = Partition(name="Talker", program=talker, walks=graph.talker, wants="audio")
    return (written, spoken, Partition(name="Code2Wav", program=code2wav, walks=graph.code2wav, wants="audio"))


def bind(model: ModelSpec, folder: Path | None, model_kwargs: Mapping[str, Any]) -> ModelSpec:
    """Bind the spec to the sizes and special ids of the checkpoint in `folder`."""
    return model if folder is None else spec(read_config(folder))


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    return [spec(OmniConfig())]


WORKLOADS = (
    WorkloadSpec(
        name="omni-speech",
        title="spoken questions, some with an image, to text and speech",
        target="mstar_qwen3omni.workloads:omni_speech",
    ),
    WorkloadSpec(name="chat", title="text to text", target="mstar_core.workloads.generic:chat"),
    WorkloadSpec(
        name="tts-short",
        title="8 to 25 words to text and speech",
        target="mstar_core.workloads.generic:speech",
        options={"outputs": ("text", "audio")},
    ),
    WorkloadSpec(
        name="omni-seedtts",
        title="sentences of the length of SeedTTS (4 to 22 words) to text and speech",
        target="mstar_core.workloads.generic:speech",
        options={"least": 4, "most": 22, "outputs": ("text", "audio")},
    ),
    WorkloadSpec(name="see", title="questions about one image", target="mstar_core.workloads.generic:see"),
)


@hookimpl
def mstar_workloads(model: ModelSpec) -> Sequence[WorkloadSpec]:
    return WORKLOADS if model.name == "qwen3_omni" else ()
