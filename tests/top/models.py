"""Models of synthetic watches: stages, routes and graphs, as the plugins declare them."""

from __future__ import annotations

from dataclasses import dataclass

from mstar_core.observe.frames import EdgeStatus, EdgeView, GraphView, NodeView, WalkView


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of requests. seconds: time of a request in it; tokens_s: tokens per second of one request."""

    node: str
    rank: int
    partition: str
    walk: str
    seconds: float = 0.05
    tokens_s: float = 0.0
    audio_x: float = 0.0
    step_ms: float = 5.0
    engine: str = "kv_cache"
    pages: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One deployment to simulate. routes: (inputs, outputs, stages in order); the last stages run in parallel."""

    name: str
    plugin: str
    gpus: tuple[str, ...]
    stages: dict[str, Stage]
    routes: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...]
    graph: GraphView
    edges: tuple[EdgeStatus, ...]
    slots: int = 64


def qwen() -> Model:
    """Two ranks, five nodes, three partitions: the usual split."""
    stages = {
        "audio": Stage(
            node="audio_encoder",
            rank=0,
            partition="Thinker",
            walk="prefill_audio",
            seconds=0.08,
            step_ms=53.0,
            engine="stateless",
        ),
        "vision": Stage(
            node="vision_encoder",
            rank=0,
            partition="Thinker",
            walk="prefill_vision",
            seconds=0.12,
            step_ms=88.0,
            engine="stateless",
        ),
        "prefill": Stage(
            node="Thinker", rank=0, partition="Thinker", walk="prefill_text", seconds=0.12, step_ms=5.2, pages=38
        ),
        "think": Stage(
            node="Thinker",
            rank=0,
            partition="Thinker",
            walk="thinker_decode",
            seconds=4.0,
            tokens_s=82.0,
            step_ms=5.2,
            pages=38,
        ),
        "talk": Stage(
            node="Talker",
            rank=1,
            partition="Talker",
            walk="talker_decode",
            seconds=5.0,
            tokens_s=90.0,
            step_ms=7.1,
            pages=20,
        ),
        "wav": Stage(
            node="Code2Wav",
            rank=1,
            partition="Code2Wav",
            walk="code2wav_chunk",
            seconds=5.0,
            audio_x=3.0,
            step_ms=14.0,
            engine="stateless",
        ),
    }
    speak = ("prefill", "think", "talk", "wav")
    return Model(
        name="qwen3_omni",
        plugin="mstar-qwen3omni",
        gpus=("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
        stages=stages,
        routes=(
            (("text",), ("text", "audio"), speak),
            (("audio",), ("text", "audio"), ("audio", *speak)),
            (("text",), ("text",), ("prefill", "think")),
            (("image", "text"), ("text",), ("vision", "prefill", "think")),
            (("video",), ("text",), ("audio", "vision", "prefill", "think")),
        ),
        graph=qwen_graph(),
        edges=(
            EdgeStatus(
                name="thinker_states", source="Thinker", into="Talker", source_rank=0, into_rank=1, is_stream=True
            ),
            EdgeStatus(
                name="codec_tokens", source="Talker", into="Code2Wav", source_rank=1, into_rank=1, is_stream=True
            ),
        ),
    )


def qwen_graph() -> GraphView:
    """Return the graph as the plugin declares it."""
    text = ["prefill_text", "thinker_decode"]
    audio, vision = ["prefill_audio", "prefill_audio_vision"], ["prefill_vision", "prefill_audio_vision"]
    talk = ["talker_prefill", "talker_decode"]
    return GraphView(
        model="qwen3_omni",
        partitions=["Thinker", "Talker", "Code2Wav"],
        nodes=[
            NodeView(name="audio_encoder", engine="stateless", partition="Thinker", replicas=[[0]], walks=audio),
            NodeView(name="vision_encoder", engine="stateless", partition="Thinker", replicas=[[0]], walks=vision),
            NodeView(
                name="Thinker",
                engine="kv_cache",
                partition="Thinker",
                replicas=[[0]],
                walks=list(dict.fromkeys((*text, *audio, *vision))),
                loops=["thinker_decode"],
            ),
            NodeView(
                name="Talker",
                engine="kv_cache",
                partition="Talker",
                replicas=[[1]],
                walks=talk,
                loops=["talker_decode"],
            ),
            NodeView(
                name="Code2Wav",
                engine="stateless",
                partition="Code2Wav",
                replicas=[[1]],
                walks=["code2wav_chunk"],
                loops=["code2wav_chunk"],
            ),
        ],
        edges=[
            EdgeView(name="mel", into="audio_encoder", modality="audio", walks=audio),
            EdgeView(name="pixels", into="vision_encoder", modality="image", walks=vision),
            EdgeView(name="tokens", into="Thinker", modality="text", walks=[*text, *audio, *vision]),
            EdgeView(name="audio_embeds", source="audio_encoder", into="Thinker", walks=audio),
            EdgeView(name="vision_embeds", source="vision_encoder", into="Thinker", walks=vision),
            EdgeView(name="token", source="Thinker", modality="text", walks=[*text, *audio, *vision]),
            EdgeView(
                name="thinker_states",
                source="Thinker",
                into="Talker",
                is_stream=True,
                chunk="fixed 1",
                walks=[*text, *talk],
            ),
            EdgeView(
                name="codec_tokens",
                source="Talker",
                into="Code2Wav",
                is_stream=True,
                chunk="25, left 25",
                walks=[*talk, "code2wav_chunk"],
            ),
            EdgeView(name="pcm", source="Code2Wav", modality="audio", walks=["code2wav_chunk"]),
        ],
        walks=[
            WalkView(name="prefill_text", partition="Thinker", nodes=["Thinker"]),
            WalkView(name="prefill_audio", partition="Thinker", nodes=["audio_encoder", "Thinker"]),
            WalkView(name="prefill_vision", partition="Thinker", nodes=["vision_encoder", "Thinker"]),
            WalkView(
                name="prefill_audio_vision", partition="Thinker", nodes=["audio_encoder", "vision_encoder", "Thinker"]
            ),
            WalkView(name="thinker_decode", partition="Thinker", nodes=["Thinker"]),
            WalkView(name="talker_prefill", partition="Talker", nodes=["Talker"]),
            WalkView(name="talker_decode", partition="Talker", nodes=["Talker"]),
            WalkView(name="code2wav_chunk", partition="Code2Wav", nodes=["Code2Wav"]),
        ],
    )


def orpheus() -> Model:
    """One rank on a CPU, two nodes, two partitions."""
    stages = {
        "prefill": Stage(node="LLM", rank=0, partition="LLM", walk="prefill", seconds=0.1, step_ms=9.0, pages=6),
        "decode": Stage(
            node="LLM", rank=0, partition="LLM", walk="decode", seconds=3.0, tokens_s=84.0, step_ms=9.0, pages=6
        ),
        "snac": Stage(
            node="snac_decoder",
            rank=0,
            partition="SNAC",
            walk="snac_chunk",
            seconds=3.0,
            audio_x=1.0,
            step_ms=21.0,
            engine="stateless",
        ),
    }
    both = ["decode", "snac_chunk"]
    return Model(
        name="orpheus",
        plugin="mstar-orpheus",
        gpus=(),
        stages=stages,
        routes=((("text",), ("audio",), ("prefill", "decode", "snac")),),
        slots=16,
        graph=GraphView(
            model="orpheus",
            partitions=["LLM", "SNAC"],
            nodes=[
                NodeView(
                    name="LLM",
                    engine="kv_cache",
                    partition="LLM",
                    replicas=[[0]],
                    walks=["prefill", "decode"],
                    loops=["decode"],
                ),
                NodeView(
                    name="snac_decoder",
                    engine="stateless",
                    partition="SNAC",
                    replicas=[[0]],
                    walks=["snac_chunk"],
                    loops=["snac_chunk"],
                ),
            ],
            edges=[
                EdgeView(name="tokens", into="LLM", modality="text", walks=["prefill"]),
                EdgeView(
                    name="audio_ids",
                    source="LLM",
                    into="snac_decoder",
                    is_stream=True,
                    chunk="window 28, stride 7",
                    walks=["prefill", *both],
                ),
                EdgeView(name="pcm", source="snac_decoder", modality="audio", walks=["snac_chunk"]),
            ],
            walks=[
                WalkView(name="prefill", partition="LLM", nodes=["LLM"]),
                WalkView(name="decode", partition="LLM", nodes=["LLM"]),
                WalkView(name="snac_chunk", partition="SNAC", nodes=["snac_decoder"]),
            ],
        ),
        edges=(EdgeStatus(name="audio_ids", source="LLM", into="snac_decoder", is_stream=True),),
    )
