"""Qwen3-Omni's nodes, streams and walks for the sizes of one checkpoint. Built by `plugin.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from mstar_core.graph import (
    CLIENT,
    KV_CACHE,
    STATELESS,
    STEP,
    Attend,
    FixedChunk,
    GraphEdge,
    GraphNode,
    KVSpec,
    LeftContext,
    Loop,
    NodeSpec,
    Sampling,
    Sequential,
    StopOn,
    Stream,
    StreamingGraphEdge,
    Walk,
    from_param,
)
from mstar_qwen3omni.params import CODEC_CHUNK, CODEC_LEFT

SPECIAL_CODES: Final = 1024
"""Ids at the top of the talker's vocabulary that are not codes. All but the stop id are suppressed."""

OPENING: Final = 6
"""Vectors before the first frame and after the three that start the answer: think marks, speaker, first text."""

PREDICTOR = tuple(from_param(f"code_predictor_{name}") for name in ("temperature", "top_k", "top_p"))
WINDOW = (from_param("codec_chunk_frames"), from_param("codec_left_context_frames"))
GIVEN = Attend(positions="given")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a checkpoint that the graph depends on. Defaults: Qwen/Qwen3-Omni-30B-A3B-Instruct."""

    thinker_layers: int = 48
    thinker_kv_heads: int = 4
    thinker_head_dim: int = 128
    talker_layers: int = 20
    talker_kv_heads: int = 2
    talker_head_dim: int = 128
    talker_vocab: int = 3072
    code_groups: int = 16
    stop_id: int = 151645
    codec_stop_id: int = 2150


@dataclass(frozen=True, slots=True, kw_only=True)
class OmniGraph:
    """Nodes, streams and walks of one checkpoint."""

    nodes: tuple[NodeSpec, ...]
    streams: tuple[Stream, ...]
    thinker: Mapping[str, Walk]
    talker: Mapping[str, Walk]
    code2wav: Mapping[str, Walk]


def build(sizes: Sizes) -> OmniGraph:
    """Build the graph: thinker, talker and vocoder, connected by two streams."""
    audio, vision = _encoders()
    thinker, talker, code2wav = _thinker(sizes), _talker(sizes), _code2wav(sizes)
    states = Stream("thinker_states", into=(talker, "states"), chunk=FixedChunk(1, after_end="empty"))
    chunk = LeftContext(CODEC_CHUNK, CODEC_LEFT, chunk_from="codec_chunk_frames", left_from="codec_left_context_frames")
    codes = Stream("codec_tokens", into=(code2wav, "codes"), chunk=chunk)
    return OmniGraph(
        nodes=(audio, vision, thinker, talker, code2wav),
        streams=(states, codes),
        thinker=_thinker_walks(sizes, audio, vision, thinker, states),
        talker=_talker_walks(sizes, talker, states, codes),
        code2wav={
            "code2wav_chunk": Loop(
                "chunks",
                GraphNode(code2wav, ("codes", STEP, *WINDOW), (GraphEdge("pcm", CLIENT, modality="audio"),)),
                over=codes,
            )
        },
    )


def _encoders() -> tuple[NodeSpec, NodeSpec]:
    audio = NodeSpec(
        name="audio_encoder",
        engine=STATELESS,
        ports={"mel": "f32[128,f]", "features": "any[a,d]"},
        batch_key=("mel",),
        doc="one clip's mel frames to 13 vectors per second; clips of unequal length never share a call",
    )
    vision = NodeSpec(
        name="vision_encoder",
        engine=STATELESS,
        ports={"pixels": "f32[p,c]", "grid": "i64[g,3]", "features": "any[v,d]", "deepstack": "any[3,v,d]"},
        batch_key=("pixels", "grid"),
        doc="image or video patches to vectors, and three deep feature maps",
    )
    return audio, vision


def _thinker(sizes: Sizes) -> NodeSpec:
    return NodeSpec(
        name="Thinker",
        engine=KV_CACHE,
        ports={
            "tokens": "i64[n]",
            "positions": "f32[3,n]",
            "audio_embeds": "any[a,d]?",
            "vision_embeds": "any[v,d]?",
            "deepstack": "any[3,v,d]?",
            "token": "i64[1]",
            "states": "any",
        },
        kv=KVSpec(layers=sizes.thinker_layers, kv_heads=sizes.thinker_kv_heads, head_dim=sizes.thinker_head_dim),
        sampling=Sampling(port="token"),
        sequence=("tokens", "token"),
        tensor_parallel=True,
        doc="text model; states: the talker's input per token read, text from its embedding, media from a middle layer",
    )


def _talker(sizes: Sizes) -> NodeSpec:
    first, stop = sizes.talker_vocab - SPECIAL_CODES, sizes.codec_stop_id
    return NodeSpec(
        name="Talker",
        engine=KV_CACHE,
        ports={
            "states": "any?",
            "positions": "f32[3,n]",
            "frame": f"i64[{sizes.code_groups}]",
            "code0": "i64[1]",
            "text_ended": "b8[1]?",
            "voice": "i64",
            "code_predictor_temperature": "f32",
            "code_predictor_top_k": "i64",
            "code_predictor_top_p": "f32",
        },
        kv=KVSpec(layers=sizes.talker_layers, kv_heads=sizes.talker_kv_heads, head_dim=sizes.talker_head_dim),
        sampling=Sampling(
            port="code0",
            prefix="talker_",
            history="output",
            suppress=(range(first, stop), range(stop + 1, sizes.talker_vocab)),
        ),
        sequence=("states",),
        tensor_parallel=True,
        doc=(
            "speech model with its residual code predictor: frame holds all codes, and is not produced at the stop id. "
            "Without states it reads the end of text once, then padding; without any text it stops at once"
        ),
    )


def _code2wav(sizes: Sizes) -> NodeSpec:
    return NodeSpec(
        name="Code2Wav",
        engine=STATELESS,
        ports={
            "codes": f"i64[n,{sizes.code_groups}]",
            "pcm": "i16[s]",
            "codec_chunk_frames": "i64",
            "codec_left_context_frames": "i64",
        },
        dtype="float32",
        batch_key=("codes",),
        doc="frames with left context to gapless sound: 1920 samples per new frame, 555 fewer in the first piece",
    )


def _thinker_walks(
    sizes: Sizes, audio: NodeSpec, vision: NodeSpec, thinker: NodeSpec, states: Stream
) -> dict[str, Walk]:
    word = GraphEdge("token", CLIENT, modality="text")
    out = (StreamingGraphEdge("states", states), word)
    hear = GraphNode(audio, ("mel",), (GraphEdge("features", thinker, into="audio_embeds"),))
    see = GraphNode(
        vision,
        ("pixels", "grid"),
        (GraphEdge("features", thinker, into="vision_embeds"), GraphEdge("deepstack", thinker)),
    )
    seen = ("vision_embeds", "deepstack")

    def read(*media: str) -> GraphNode:
        return GraphNode(thinker, ("tokens", "positions", *media), out, attend=GIVEN)

    return {
        "prefill_text": read(),
        "prefill_history": GraphNode(thinker, ("tokens", "positions"), attend=GIVEN),
        "prefill_audio": Sequential(hear, read("audio_embeds")),
        "prefill_vision": Sequential(see, read(*seen)),
        "prefill_audio_vision": Sequential(hear, see, read("audio_embeds", *seen)),
        "thinker_decode": Loop(
            "thinker_loop",
            GraphNode(thinker, ("token",), out),
            carry={"token": "token"},
            stop=StopOn("token", (sizes.stop_id,), unless="ignore_eos"),
        ),
    }


def _talker_walks(sizes: Sizes, talker: NodeSpec, states: Stream, codes: Stream) -> dict[str, Walk]:
    speak = (StreamingGraphEdge("frame", codes),)
    return {
        "talker_prefill": GraphNode(talker, ("states", "positions"), attend=GIVEN),
        "talker_last_prefill": GraphNode(
            talker, ("states", from_param("voice"), *PREDICTOR), speak, attend=Attend(tokens=OPENING)
        ),
        "talker_decode": Loop(
            "talker_loop",
            GraphNode(talker, ("states", "frame", "text_ended", *PREDICTOR), speak, attend=Attend(tokens=1)),
            over=states,
            carry={"frame": "frame", "text_ended": "text_ended"},
            stop=StopOn("code0", (sizes.codec_stop_id,)),
        ),
    }
