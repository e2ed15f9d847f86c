"""Nodes, streams and walks of Qwen3-TTS for one checkpoint (specification section 17). Built by `plugin.py`.

Three partitions run at the same time: the text gives ids, the talker reads one per frame and writes frames of codes,
and the codec turns these into sound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from mstar_core.graph import (
    CLIENT,
    KV_CACHE,
    RANDOM,
    STATELESS,
    Attend,
    EngineHints,
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
from mstar_qwen3tts.checkpoint.config import TTSConfig
from mstar_qwen3tts.params import CHUNK_FRAMES

SPECIAL_CODES: Final = 1024
"""Ids at the top of the talker's vocabulary that are not codes. All but the end of speech are suppressed."""

PROMPT_ROWS: Final = (16, 32, 64, 128, 256, 512, 1024)
"""Packed rows of captured prompt passes."""

RULE: Final = tuple(from_param(f"subtalker_{name}") for name in ("temperature", "top_k", "top_p"))
IGNORE_EOS: Final = from_param("ignore_eos")


@dataclass(frozen=True, slots=True, kw_only=True)
class TTSGraph:
    """Nodes, streams and walks of one checkpoint."""

    nodes: tuple[NodeSpec, ...]
    streams: tuple[Stream, ...]
    text: Mapping[str, Walk]
    talker: Mapping[str, Walk]
    codec: Mapping[str, Walk]


def build(config: TTSConfig) -> TTSGraph:
    """Build the graph of a checkpoint. Only a Base checkpoint has the nodes that clone voices."""
    feed, talker, codec = _feed(), _talker(config), _codec(config)
    ids = Stream("text_ids", into=(talker, "text"), chunk=FixedChunk(1, after_end="empty"))
    ramp = LeftContext(
        CHUNK_FRAMES,
        0,
        first=1,
        grows=True,
        early=True,
        chunk_from="codec_chunk_frames",
        first_from="initial_codec_chunk_frames",
    )
    frames = Stream("codec_frames", into=(codec, "codes"), chunk=ramp)
    speak = GraphNode(
        talker,
        ("code0", "last_hidden", "begun", "text", RANDOM, *RULE, IGNORE_EOS),
        (StreamingGraphEdge("frame", frames),),
        attend=Attend(tokens=1),
    )
    decode = Loop(
        "talker_loop",
        speak,
        over=ids,
        carry={name: name for name in ("code0", "last_hidden", "begun")},
        stop=StopOn("code0", (config.codes.eos,)),
    )
    sound = GraphNode(codec, ("codes", "state"), (GraphEdge("pcm", CLIENT, modality="audio"),))
    talking: dict[str, Walk] = {"talker_decode": decode}
    sounding: dict[str, Walk] = {
        "codec_begin": GraphNode(codec, ("fresh",)),
        "codec_chunk": Loop("pieces", sound, over=frames, carry={"state": "state"}),
    }
    nodes: tuple[NodeSpec, ...] = (feed, talker, codec)
    streams: tuple[Stream, ...] = (ids, frames)
    if config.speaker is None:
        talking["talker_prefill"] = GraphNode(talker, ("prompt", IGNORE_EOS))
    else:
        encoder, prompt = _voice_encoder(config), _voice_prompt(config)
        nodes = (encoder, prompt, feed, talker, codec)
        heard = (GraphEdge("speaker", prompt), GraphEdge("frames", prompt))
        read = Sequential(
            GraphNode(
                prompt,
                ("prompt", "speaker", "frames"),
                (GraphEdge("rows", talker, into="prompt"), GraphEdge("embeds", talker)),
            ),
            GraphNode(talker, ("prompt", "embeds", IGNORE_EOS)),
        )
        talking["talker_prefill_timbre"] = Sequential(GraphNode(encoder, ("audio",), heard), read)
        talking["talker_prefill_voice"] = talking["talker_prefill_timbre"]
        # All inputs follow from the recording's content, so the state of a voice is found again by it.
        sounding["codec_begin_voice"] = Sequential(
            GraphNode(encoder, ("audio",), (GraphEdge("frames", codec, into="reference"),)),
            GraphNode(codec, ("reference",)),
        )
    return TTSGraph(
        nodes=nodes,
        streams=streams,
        text={"text": GraphNode(feed, ("ids",), (StreamingGraphEdge("text", ids),))},
        talker=talking,
        codec=sounding,
    )


def _feed() -> NodeSpec:
    return NodeSpec(
        name="TextFeed",
        engine=STATELESS,
        ports={"ids": "i64[m]", "text": "i64[m]"},
        batch_key=("ids",),
        doc="ids of text that the talker reads along with its speech",
    )


def _talker(config: TTSConfig) -> NodeSpec:
    sizes, stop = config.talker, config.codes.eos
    return NodeSpec(
        name="Talker",
        engine=KV_CACHE,
        weight_bytes=3_850_000_000,
        ports={
            "prompt": f"i64[n,{1 + config.groups}]",
            "embeds": f"any[n,{sizes.width}]?",
            "text": "i64[1]?",
            "code0": "i64[1]",
            "last_hidden": f"any[{sizes.width}]",
            "begun": "b8[1]",
            "frame": f"i64[{config.groups}]",
            "random": f"f32[{config.groups - 1}]",
            "subtalker_temperature": "f32",
            "subtalker_top_k": "i64",
            "subtalker_top_p": "f32",
            "ignore_eos": "b8",
        },
        kv=KVSpec(layers=sizes.layers, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim, request_tokens=512),
        sampling=Sampling(
            port="code0",
            history="output",
            suppress=(range(sizes.vocab - SPECIAL_CODES, stop), range(stop + 1, sizes.vocab)),
        ),
        sequence=("prompt",),
        hints=EngineHints(capture_prompts=PROMPT_ROWS),
        doc="speech model with its code predictor. A step completes the frame of the last code, reads it with the next "
        "text id, and draws the first code of the next frame",
    )


def _codec(config: TTSConfig) -> NodeSpec:
    sizes = config.codec
    return NodeSpec(
        name="Codec",
        engine=STATELESS,
        dtype="float32",
        weight_bytes=457_000_000,
        ports={
            "fresh": "i64[1]",
            "reference": f"i64[f,{sizes.groups}]",
            "codes": f"i64[n,{sizes.groups}]",
            "state": "f32[s]",
            "pcm": "i16[samples]",
        },
        batch_key=("fresh", "codes"),
        doc=f"frames to gapless sound: {sizes.frame_samples} samples per frame. Its state is carried by the request",
    )


def _voice_encoder(config: TTSConfig) -> NodeSpec:
    return NodeSpec(
        name="VoiceEncoder",
        engine=STATELESS,
        dtype="float32",
        weight_bytes=274_000_000,
        ports={"audio": "f32[c,s]", "speaker": f"f32[{config.talker.width}]", "frames": f"i64[f,{config.groups}]"},
        batch_key=(),
        ragged=("audio",),
        doc="a recording at 24 kHz [1, s] to the speaker's vector and its frames of codes",
    )


def _voice_prompt(config: TTSConfig) -> NodeSpec:
    rows, width = f"i64[n,{1 + config.groups}]", config.talker.width
    return NodeSpec(
        name="VoicePrompt",
        engine=STATELESS,
        dtype="float32",
        ports={
            "prompt": rows,
            "speaker": f"f32[{width}]",
            "frames": f"i64[f,{config.groups}]",
            "rows": rows,
            "embeds": f"any[n,{width}]",
        },
        batch_key=(),
        ragged=("prompt", "speaker", "frames"),
        doc="puts the speaker's vector and the frames of a recording at their rows of the prompt",
    )
