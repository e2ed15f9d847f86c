"""Model spec of Whisper: a spectrogram, an encoder of windows, and a decoder that reads the encoder as its memory.

Imports the standard library and light packages only, because every process loads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mstar_core.graph import (
    CLIENT,
    KV_CACHE,
    STATELESS,
    GraphEdge,
    GraphNode,
    KVSpec,
    Loop,
    NodeSpec,
    Sampling,
    Sequential,
    StopOn,
    Walk,
)
from mstar_core.plugin import (
    Audio,
    ModelSpec,
    Partition,
    Sample,
    Segments,
    Surface,
    Text,
    TextSampling,
    WeightRef,
    WorkloadSpec,
    hookimpl,
    param,
    sampling_param,
)
from mstar_whisper.checkpoint.config import OFFICIAL, RATE, WhisperConfig, read_config
from mstar_whisper.program import MEMORY, transcribe

PLUGIN_API = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(TextSampling):
    """Parameters of a request."""

    temperature: float = sampling_param("temperature", 0.0, "of the first attempt; 0 takes the most likely id")
    language: str | None = param(None, "code or English name; detected by default", openai="language")
    task: str = param("transcribe", "translate writes English", choices=("transcribe", "translate"))
    prompt: str | None = param(None, "text before the recording, such as names and terms", openai="prompt")
    timestamps: bool = param(
        False, "draw timestamps; recordings longer than a window always have them", openai="timestamps"
    )
    words: bool = param(False, "times of words, with the segments", openai="words")
    fallback: bool = param(True, "decode a poor window again at higher temperatures")
    compression_threshold: float = param(2.4, "most times that a good text can be compressed", gt=0)
    logprob_threshold: float = param(-1.0, "least mean log-probability of a good text", le=0)
    no_speech_threshold: float = param(0.6, "probability above which a poor window is silence", ge=0, le=1)
    vad: bool = param(False, "window only the parts with speech, cut at pauses; needs mstarctl[realtime] on the server")
    batch_size: int = param(
        1, "windows of a recording decoded side by side, by voice activity as with vad; 1: one by one", ge=1, le=64
    )
    condition_on_previous: bool = param(False, "read the text of earlier windows before each window")
    incremental: bool = param(False, "without fallback: emit ids one by one", openai="transcription:stream")
    max_output_tokens: int = param(448, "most ids of a window; cut to the context", ge=1, openai="max_tokens")
    ignore_eos: bool = param(False, "go on to the limit, for load tests")
    seed: int | None = param(None, "same seed, same text", ge=0, le=2**63 - 1, openai="seed")


def whisper(config: WhisperConfig) -> ModelSpec:
    """Return the spec for a checkpoint of these sizes."""
    width, states, ids = config.width, config.states, config.ids
    spectrogram = NodeSpec(
        name="spectrogram",
        engine=STATELESS,
        dtype="float32",
        ports={"pcm": "f32[s]", "mel": f"f32[f,{config.bins}]"},
        ragged=("pcm",),
        doc="16 kHz samples to log-mel frames",
    )
    encoder = NodeSpec(
        name="encoder",
        engine=STATELESS,
        ports={"mel": f"f32[f,{config.bins}]", "place": "i64[2]", "states": f"any[{states},{width}]"},
        ragged=("mel",),
        weight_bytes=1_273_000_000,
        doc="one window of a spectrogram to states",
    )
    decoder = NodeSpec(
        name="decoder",
        engine=KV_CACHE,
        ports={
            "tokens": "i64[n]?",
            "token": "i64[1]",
            "marks": "i64[8]",
            "states": f"any[n,{width}]?",
            "written": "i64[n]?",
            "review": "i64[4]?",
            "sound": f"any[{states},{width}]?",
            "summary": "f32[2]",
            "weights": "any[n,k]",
        },
        kv=KVSpec(
            layers=config.decoder_layers,
            kv_heads=config.decoder_heads,
            head_dim=config.head_dim,
            branches=("main", MEMORY),
            memory=MEMORY,
            request_tokens=states + 128,
        ),
        sampling=Sampling(port="token", vocab=config.vocab),
        sequence=("tokens", "states", "written"),
        row_ports=("review", "sound", "summary", "weights"),
        weight_bytes=344_000_000,
        doc="ids to the next id, with attention over the states of the encoder",
    )
    memory = decoder.on_branch("decoder_memory", MEMORY)
    transcript = NodeSpec(
        name="transcript",
        engine=STATELESS,
        dtype="float32",
        ports={"ids": "i64[n]", "record": "f32[h]", "weights": "any[n,k]?", "text": "i64[n]", "segments": "f32[r]"},
        ragged=("ids", "record", "weights"),
        doc="ids and record of a window, for the client",
    )
    text, segments = GraphEdge("text", CLIENT, modality="text"), GraphEdge("segments", CLIENT, modality="segments")
    encode = GraphNode(encoder, ("mel", "place"), (GraphEdge("states", memory),))
    remember = GraphNode(memory, ("states",))
    others = _without(sorted(ids.languages.values()), config.vocab)
    told = ("ids", "record", "weights")
    walks: dict[str, Walk] = {
        "first": Sequential(GraphNode(spectrogram, ("pcm",), (GraphEdge("mel", encoder),)), encode, remember),
        "listen": Sequential(encode, remember),
        "detect": GraphNode(decoder, ("tokens",), suppress=others),
        "review": GraphNode(decoder, ("written", "review", "sound")),
        "tell": GraphNode(transcript, told, (text, segments)),
        "tell_record": GraphNode(transcript, told, (segments,)),
    }
    stop = StopOn("token", (ids.end,), unless="ignore_eos")
    for aloud, edges in (("", ()), ("_aloud", (GraphEdge("token", CLIENT, modality="text"),))):
        body = GraphNode(decoder, ("token", "marks"), edges)
        walks[f"prompt{aloud}"] = GraphNode(decoder, ("tokens",), edges)
        walks[f"write{aloud}"] = Loop(f"write{aloud}", body, carry={"token": "token", "marks": "marks"}, stop=stop)
    return ModelSpec(
        name="whisper",
        title="Whisper: speech to text and to English, with timestamps, for recordings of any length",
        plugin="whisper",
        inputs=(Audio(rate=RATE), Text()),
        outputs=(Text(), Segments()),
        params=Params,
        at_once="batch_size",
        routes=frozenset({"transcription", "translation"}),
        surfaces={"translation": Surface(params={"task": "translate"})},
        nodes=(spectrogram, encoder, decoder, memory, transcript),
        partitions=(Partition(name="whisper", program=transcribe, walks=walks),),
        processor="mstar_whisper.processor:Processor",
        model="mstar_whisper.model:Whisper",
        bind=bind,
        configs="mstar_whisper:configs",
        default_config="whisper_single_gpu",
        weights={"whisper": WeightRef(repo="openai/whisper-large-v3-turbo")},
        samples=_samples(config),
        tiny="mstar_whisper.sources.tiny:write_tiny",
        mini="mstar_whisper.checkpoint.shipped:find_mini",
        make_samples="mstar_whisper.sample_inputs:make_samples",
        resolve="mstar_whisper.sources.download:resolve_weights",
        notice="whisper:tiny has random weights: its text is noise",
        mini_notice="whisper:mini is a miniature of under 1M parameters: it writes down 130 words of orpheus:mini",
        max_seq_len=max(states, config.positions),
    )


def _without(kept: Sequence[int], vocab: int) -> tuple[range, ...]:
    """Return all ids but these, which ascend."""
    borders = [-1, *kept, vocab]
    spans = (range(low + 1, high) for low, high in pairwise(borders))
    return tuple(span for span in spans if len(span))


def _samples(config: WhisperConfig) -> tuple[Sample, ...]:
    seconds = config.frames / 100
    spoken: int | None = next(iter(config.ids.languages.values()), 0)

    def sample(name: str, share: float, outputs: set[str], language: int | None = spoken, **params: Any) -> Sample:
        length = share * seconds
        return Sample(
            name=name,
            inputs={"pcm": (int(length * RATE),)},
            files=("audio",),
            outputs=frozenset(outputs),
            params=params,
            facts={
                **config.facts(),
                "prompt": (1,) if "prompt" in params else (),
                "language": language,
                "frames": int(100 * max(length, seconds)),
                "windows": None,
            },
            seconds=length,
        )

    return (
        sample("sentence", 0.2, {"text"}, fallback=False),
        sample("stream", 0.5, {"text", "segments"}, fallback=False, incremental=True),
        # Random weights would be poor at every temperature.
        sample("language", 0.4, {"text"}, None, prompt="names", logprob_threshold=-100.0, compression_threshold=100.0),
        sample("recording", 2.2, {"text", "segments"}, fallback=False, words=True),
    )


def bind(spec: ModelSpec, folder: Path | None, model_kwargs: Mapping[str, Any]) -> ModelSpec:
    """Bind the spec to the sizes and ids of the checkpoint in `folder`."""
    return spec if folder is None else whisper(read_config(folder))


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    """Return the models of this plugin."""
    return [whisper(OFFICIAL)]


WORKLOADS = (WorkloadSpec(name="clips", title="recordings of 30 s to text", target="mstar_whisper.workloads:clips"),)


@hookimpl
def mstar_workloads(model: ModelSpec) -> Sequence[WorkloadSpec]:
    """Offer load tests of this model."""
    return WORKLOADS if model.name == "whisper" else ()
