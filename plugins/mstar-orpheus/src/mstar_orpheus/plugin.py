"""Model spec of Orpheus: nodes, walks, stream and parameters. Imports only the standard library and light packages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mstar_core.errors import ConfigError, RequestError, did_you_mean
from mstar_core.graph import (
    CHUNK_FIRST,
    CHUNK_LAST,
    CLIENT,
    KV_CACHE,
    STATELESS,
    STEP,
    GraphEdge,
    GraphNode,
    KVSpec,
    Loop,
    NodeSpec,
    Sampling,
    SlidingWindow,
    StopOn,
    Stream,
    StreamingGraphEdge,
    from_param,
)
from mstar_core.plugin import (
    Audio,
    ModelSpec,
    Partition,
    ProgramRequest,
    Run,
    Sample,
    Text,
    TextSampling,
    Unresumable,
    WeightRef,
    WorkloadSpec,
    hookimpl,
    param,
    sampling_param,
)
from mstar_core.plugin.program import ProgramGenerator
from mstar_orpheus.checkpoint.config import (
    EARLY_FRAMES,
    IDS_PER_FRAME,
    NOISE_MODES,
    VOICES,
    WINDOW_FRAMES,
    CheckpointConfig,
    SpecialIds,
    read_config,
)

PLUGIN_API = 1
OFFICIAL = CheckpointConfig(
    vocab_size=156940,
    layers=28,
    heads=24,
    mlp=8192,
    kv_heads=8,
    head_dim=128,
    max_positions=131072,
    ids=SpecialIds(),
    codebook_size=4096,
    frame_samples=2048,
    sample_rate=24000,
)
"""Sizes of `canopylabs/orpheus-3b-0.1-ft` and `hubertsiuzdak/snac_24khz`: shown before a checkpoint is read."""

FIRST_FRAMES = 3
"""Frames of the first window by default. Its sound differs from that of the reference's window by less than the sounds
of two seeds do: see `train/first_window.py`."""

WINDOW_INPUTS = (STEP, CHUNK_FIRST, CHUNK_LAST, from_param("flush"), from_param("noise"), from_param("seed"))
"""Inputs of the vocoder for each window besides its ids."""

START_KWARGS = {"allow_any_voice": False, "restrict_vocabulary": False}
"""Keys of model_kwargs, with defaults.

allow_any_voice: accept voices that the fine-tune does not have. restrict_vocabulary: sample only audio ids and the end
of speech. This is faster than the reference and differs if the model would sample other ids.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenParams(TextSampling):
    """Parameters of a deployment that accepts any voice (allow_any_voice)."""

    voice: str = param("tara", f"speaker: {', '.join(VOICES)}", choices=VOICES, any_choice=True, openai="voice")
    temperature: float = sampling_param("temperature", 0.6)
    top_p: float = sampling_param("top_p", 0.8)
    repetition_penalty: float = param(1.3, "over prompt and output; 1.1 or more is advised", ge=1, le=10)
    max_output_tokens: int = param(
        4096, "audio ids, about 82 per second; cut to the context", ge=1, openai="max_tokens"
    )
    ignore_eos: bool = param(False, "go on to the limit, for load tests")
    seed: int | None = param(None, "same seed, same sound", ge=0, le=2**63 - 1, openai="seed")
    first_window_frames: int = param(
        FIRST_FRAMES,
        "frames in the first window; the reference has 4. 3 and 2 send the first sound 7 and 14 ids sooner, and change "
        "its first 85 ms by 0.07 and 3 dB; later sound stays",
        ge=min(EARLY_FRAMES),
        le=WINDOW_FRAMES,
    )
    flush: bool = param(False, "send the first and the last frames too, which the reference leaves out")
    noise: str = param("seeded", "noise of the vocoder; global depends on other requests", choices=NOISE_MODES)
    prompt_token_ids: tuple[int, ...] | None = param(None, "the whole prompt as ids, in place of text and voice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(OpenParams):
    """Parameters of the English fine-tune, with a fixed list of voices."""

    def check(self) -> Iterable[RequestError]:
        """Check the voice, ignoring case. An empty voice is allowed."""
        name = self.voice.strip().lower()
        if name and name not in VOICES:
            nearest = did_you_mean(name, VOICES)
            hint = f"the voices are {', '.join(VOICES)}" + (
                f"; {nearest}" if nearest.startswith("did you mean") else ""
            )
            yield RequestError(
                f"unknown voice {self.voice[:40]!r}",
                hint=hint,
                field="voice",
                value=self.voice[:40],
                allowed=", ".join(VOICES),
            )


def llm(request: ProgramRequest) -> ProgramGenerator:
    """Run prefill, whose id is the first audio id, then decode.

    Both runs are yielded together, so that decode starts without a round trip to the conductor.
    """
    yield [
        Run("prefill", tokens=request.inputs["text_tokens"]),
        Run("decode", max_iters=request.params.max_output_tokens - 1),
    ]


def vocoder(request: ProgramRequest) -> ProgramGenerator:
    """Decode windows until the stream ends, even if it has none."""
    yield Run("snac_chunk")


def orpheus(config: CheckpointConfig, *, restricts: bool = False) -> ModelSpec:
    """Return the spec for a checkpoint. restricts: sample only audio ids and the stop id."""
    kv = KVSpec(layers=config.layers, kv_heads=config.kv_heads, head_dim=config.head_dim)
    lm = NodeSpec(
        name="LLM",
        engine=KV_CACHE,
        ports={"tokens": "i64[n]", "token": "i64[1]"},
        kv=kv,
        sampling=Sampling(port="token", vocabulary=speech_ids(config) if restricts else (), vocab=config.vocab_size),
        tensor_parallel=True,
        parallel_sizes=(("heads", config.heads), ("values of an MLP", config.mlp)),
        weight_bytes=6_602_000_000,
        adapter_prefix="",
        doc="Llama decoder that speaks in audio ids",
    )
    snac = NodeSpec(
        name="snac_decoder",
        engine=STATELESS,
        ports={"window": "i64[n]", "pcm": "i16[samples]"},
        dtype="float32",
        batch_key=("window",),
        weight_bytes=80_000_000,
        doc="SNAC: seven ids a frame to 24 kHz samples",
    )
    window = SlidingWindow(WINDOW_FRAMES * IDS_PER_FRAME, IDS_PER_FRAME, tail="drop", first_from="first_window_frames")
    ids = Stream("audio_ids", into=(snac, "window"), chunk=window, accept=config.audio_ids, flush_if="flush")
    prefill = GraphNode(lm, ("tokens",), (StreamingGraphEdge("token", ids),))
    speak = GraphNode(lm, ("token",), (StreamingGraphEdge("token", ids),))
    stop = StopOn("token", (config.ids.stop,), unless="ignore_eos")
    decode = Loop("decode_loop", speak, carry={"token": "token"}, stop=stop)
    chunk = GraphNode(snac, ("window", *WINDOW_INPUTS), (GraphEdge("pcm", CLIENT, modality="audio"),))
    return ModelSpec(
        name="orpheus",
        title="Orpheus TTS 3B",
        plugin="orpheus",
        inputs=(Text(),),
        outputs=(Audio(rate=config.sample_rate, channels=1),),
        params=Params,
        routes=frozenset({"speech"}),
        nodes=(lm, snac),
        streams=(ids,),
        partitions=(
            Partition(name="LLM", program=llm, walks={"prefill": prefill, "decode": decode}),
            Partition(name="SNAC", program=vocoder, walks={"snac_chunk": Loop("windows", chunk, over=ids)}),
        ),
        processor="mstar_orpheus.processor:Processor",
        model="mstar_orpheus.model:Orpheus",
        bind=bind,
        model_kwargs=START_KWARGS,
        configs="mstar_orpheus:configs",
        default_config="orpheus_colocated",
        weights={
            "lm": WeightRef(repo="canopylabs/orpheus-3b-0.1-ft"),
            "snac": WeightRef(repo="hubertsiuzdak/snac_24khz", files=("config.json", "pytorch_model.bin"), format="pt"),
        },
        samples=(
            Sample(name="sentence", inputs={"text_tokens": (24,)}, outputs=frozenset({"audio"})),
            Sample(
                name="one id",
                inputs={"text_tokens": (1,)},
                outputs=frozenset({"audio"}),
                params={"max_output_tokens": 1},
            ),
            Sample(
                name="flushed",
                inputs={"text_tokens": (9,)},
                outputs=frozenset({"audio"}),
                params={"flush": True, "voice": "leo"},
            ),
        ),
        tiny="mstar_orpheus.sources.tiny:write_tiny",
        make_samples="mstar_orpheus.sample_inputs:make_samples",
        mini="mstar_orpheus.checkpoint.shipped:find_mini",
        resolve="mstar_orpheus.sources.download:resolve_weights",
        notice="orpheus:tiny has random weights: the sound is noise",
        mini_prompt="The red fox ran over the green hill today.",
        mini_notice="orpheus:mini is a miniature of under 3M parameters: it speaks one English sentence at a time",
        max_seq_len=min(8192, config.max_positions),
        unresumable=(Unresumable(reason="its noise depends on other requests", params={"noise": "global"}),),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniatureParams(Params):
    """Parameters of the miniature, which speaks best with little chance and without a penalty."""

    temperature: float = sampling_param("temperature", 0.4)
    top_p: float = sampling_param("top_p", 0.9)
    repetition_penalty: float = param(1.0, "over prompt and output; 1 is off", ge=1, le=10)


def speech_ids(config: CheckpointConfig) -> tuple[range, ...]:
    """Return the audio ids and the stop id, ascending."""
    stop = range(config.ids.stop, config.ids.stop + 1)
    return (stop, config.audio_ids) if stop.start < config.audio_ids.start else (config.audio_ids, stop)


def bind(spec: ModelSpec, folder: Path | None, model_kwargs: Mapping[str, Any]) -> ModelSpec:
    """Bind the spec to a checkpoint and model_kwargs. Raises WeightsError for files, ConfigError for model_kwargs."""
    for key in model_kwargs:
        if key not in START_KWARGS:
            hint = did_you_mean(key, START_KWARGS)
            raise ConfigError(f"unknown model_kwargs key of orpheus: {key!r}", hint=hint, key=f"model_kwargs.{key}")
        if not isinstance(model_kwargs[key], bool):
            raise ConfigError(f"{key} is {model_kwargs[key]!r}", hint="write true or false", key=f"model_kwargs.{key}")
    kwargs = START_KWARGS | dict(model_kwargs)
    config = OFFICIAL if folder is None else read_config(folder)
    bound = orpheus(config, restricts=kwargs["restrict_vocabulary"])
    fixed = MiniatureParams if config.is_miniature else Params
    return replace(bound, params=OpenParams if kwargs["allow_any_voice"] else fixed, model_kwargs=kwargs)


ORPHEUS = orpheus(OFFICIAL)


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    """Return the models of this plugin."""
    return [ORPHEUS]


IDS_PER_WORD = 30
"""Forced length of speech in load tests: 0.37 s a word."""

WORKLOADS = (
    WorkloadSpec(
        name="tts-short",
        title="8 to 25 words to speech",
        target="mstar_core.workloads.generic:speech",
        options={"ids_per_word": IDS_PER_WORD},
    ),
    WorkloadSpec(
        name="tts-long",
        title="80 to 200 words to speech",
        target="mstar_core.workloads.generic:speech",
        options={"least": 80, "most": 200, "ids_per_word": IDS_PER_WORD},
    ),
)


@hookimpl
def mstar_workloads(model: ModelSpec) -> Sequence[WorkloadSpec]:
    return WORKLOADS if model.name == "orpheus" else ()
