"""Model specs of Qwen3-TTS: text to streamed speech, in preset or described voices, and in cloned ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mstar_core.plugin import (
    Audio,
    ModelSpec,
    Partition,
    Sample,
    Text,
    WeightRef,
    WorkloadSpec,
    hookimpl,
)
from mstar_qwen3tts.checkpoint.config import BASE, SpeakerSizes, TTSConfig, read_config
from mstar_qwen3tts.graph import build
from mstar_qwen3tts.params import Params, bound_params
from mstar_qwen3tts.program import LIVE, TIMBRE, VOICE, codec, talker, text

PLUGIN_API = 1
CUSTOM_NAME, BASE_NAME = "qwen3_tts", "qwen3_tts_base"
SPEAKS = frozenset({"audio"})
FEW = {"max_output_tokens": 12}
"""Limit of speech in conformance checks, which repeat a sample many times: several pieces of sound."""


def samples(config: TTSConfig) -> tuple[Sample, ...]:
    """Return sample requests: the text in the prompt, or read along; one frame; a cloned voice."""
    columns = 1 + config.groups
    whole: dict[str, tuple[int, ...]] = {"prompt": (30, columns), "fresh": (1,)}
    along: dict[str, tuple[int, ...]] = {"prompt": (9, columns), "fresh": (1,), "trailing": (20,)}
    read = {"non_streaming_mode": False}
    if config.speaker is None:
        return (
            Sample(name="sentence", inputs=whole, outputs=SPEAKS, tiny=FEW),
            Sample(name="text read along", inputs=along, outputs=SPEAKS, params=read, tiny=FEW),
            Sample(name="one frame", inputs=whole, outputs=SPEAKS, params={"max_output_tokens": 1}),
        )
    heard: dict[str, tuple[int, ...]] = {"audio": (1, 72000)}
    return (
        Sample(
            name="timbre", inputs=along, segments=((TIMBRE, heard),), outputs=SPEAKS, tiny=FEW, files=("audio", "text")
        ),
        Sample(
            name="voice",
            inputs={**along, "prompt": (46, columns)},
            segments=((VOICE, heard),),
            outputs=SPEAKS,
            params={"ref_text": "Hi."},
            tiny=FEW,
            files=("audio", "text"),
        ),
    )


def spec(config: TTSConfig) -> ModelSpec:
    """Return the spec for a checkpoint."""
    graph, clones = build(config), config.speaker is not None
    kind = "cloned voices" if clones else "preset or described voices"
    return ModelSpec(
        name=BASE_NAME if clones else CUSTOM_NAME,
        title=f"Qwen3-TTS 12 Hz: text to streamed speech in {kind}",
        plugin="qwen3_tts",
        inputs=(Text(grows=LIVE), *([Audio(rate=24000, channels=1)] if clones else ())),
        outputs=(Audio(rate=config.codec.sample_rate, channels=1, token_loop="talker_loop"),),
        params=Params,
        routes=frozenset({"speech"}),
        nodes=graph.nodes,
        streams=graph.streams,
        partitions=(
            Partition(name="Talker", program=talker, walks=graph.talker),
            Partition(name="Codec", program=codec, walks=graph.codec),
            Partition(name="Text", program=text, walks=graph.text),
        ),
        processor="mstar_qwen3tts.processor:Processor",
        model="mstar_qwen3tts.model:Qwen3TTS",
        bind=bind,
        configs="mstar_qwen3tts:configs",
        default_config="qwen3tts_base_colocated" if clones else "qwen3tts_colocated",
        weights={
            "base" if clones else "tts": WeightRef(
                repo=f"Qwen/Qwen3-TTS-12Hz-1.7B-{'Base' if clones else 'CustomVoice'}",
                files=("*.json", "merges.txt", "*.safetensors", "speech_tokenizer/*"),
            )
        },
        max_seq_len=min(8192, config.max_positions),
        samples=samples(config),
        tiny=f"mstar_qwen3tts.sources.tiny:write_{'base' if clones else 'custom'}",
        mini=None if clones else "mstar_qwen3tts.checkpoint.shipped:find_mini",
        resolve=f"mstar_qwen3tts.sources.download:resolve_{'base' if clones else 'custom'}",
        make_samples="mstar_qwen3tts.sample_inputs:make_samples",
        notice=f"{BASE_NAME if clones else CUSTOM_NAME}:tiny has random weights: the sound is noise",
        mini_prompt="" if clones else "seven three one",
        mini_notice="qwen3_tts:mini is a miniature of under 1M parameters: it speaks digits",
    )


def bind(model: ModelSpec, folder: Path | None, model_kwargs: Mapping[str, Any]) -> ModelSpec:
    """Bind the spec to the sizes, names and ids of the checkpoint in `folder`."""
    if folder is None:
        return model
    config = read_config(folder)
    return replace(spec(config), params=bound_params(config))


def official_base() -> TTSConfig:
    """Return the sizes of Qwen/Qwen3-TTS-12Hz-1.7B-Base."""
    return TTSConfig(kind=BASE, voices={}, dialects={}, speaker=SpeakerSizes(output=TTSConfig().talker.width))


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    """Return the models of this plugin."""
    return [spec(TTSConfig()), spec(official_base())]


FRAMES_PER_WORD = 4
"""Forced length of speech in load tests: 0.32 s a word."""

WORKLOADS = (
    WorkloadSpec(
        name="tts-short",
        title="8 to 25 words to speech",
        target="mstar_core.workloads.generic:speech",
        options={"ids_per_word": FRAMES_PER_WORD},
    ),
    WorkloadSpec(
        name="tts-long",
        title="80 to 200 words to speech",
        target="mstar_core.workloads.generic:speech",
        options={"least": 80, "most": 200, "ids_per_word": FRAMES_PER_WORD},
    ),
)


CLONING = (
    WorkloadSpec(
        name="tts-clone", title="8 to 25 words in the voice of a recording", target="mstar_qwen3tts.workloads:clones"
    ),
)


@hookimpl
def mstar_workloads(model: ModelSpec) -> Sequence[WorkloadSpec]:
    return {CUSTOM_NAME: WORKLOADS, BASE_NAME: CLONING}.get(model.name, ())
