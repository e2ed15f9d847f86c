"""Qwen3-Omni's nodes, streams and walks for one checkpoint (specification section 14). Built by `plugin.py`.

Three partitions run at the same time. The thinker reads the prompt and writes text. The talker reads the user's turns
again: text as ids, media as the thinker's hidden states, which are the only tensors between the two. Generated text
reaches it as ids. Its frames of codes go to Code2Wav, which returns sound.
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
    STEP,
    Attachment,
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
from mstar_qwen3omni.checkpoint.config import DecoderSizes, OmniConfig
from mstar_qwen3omni.params import CODEC_CHUNK, CODEC_FIRST, CODEC_LEFT
from mstar_qwen3omni.program import CONTINUES

SPECIAL_CODES: Final = 1024
"""Ids at the top of the talker's vocabulary that are not codes. All but the stop id are suppressed (section 12)."""

PROMPT_TOKENS: Final = (64, 128, 256, 512, 768, 1024, 1536, 2048)
"""Packed tokens of captured prompt passes. Uncaptured, the launches of 20 or 48 layers take 12 to 30 ms of the host."""

OPENING: Final = 6
"""Vectors that open the talker's answer after those of `<|im_start|>assistant` and a new line (section 10, 3 to 8)."""

PREDICTOR: Final = tuple(from_param(f"code_predictor_{name}") for name in ("temperature", "top_k", "top_p"))
WINDOW: Final = tuple(from_param(f"codec_{name}") for name in ("first_frames", "chunk_frames", "left_context_frames"))
PLACED: Final = Attend(positions="given")


@dataclass(frozen=True, slots=True, kw_only=True)
class OmniGraph:
    """Nodes, streams and walks of one checkpoint. Without speech there are neither talker nor vocoder."""

    nodes: tuple[NodeSpec, ...]
    streams: tuple[Stream, ...]
    thinker: Mapping[str, Walk]
    talker: Mapping[str, Walk]
    code2wav: Mapping[str, Walk]


def build(config: OmniConfig) -> OmniGraph:
    """Build the graph of a checkpoint."""
    audio, vision = _encoders(config)
    thinker = _thinker(config)
    if not config.has_speech:
        return OmniGraph(
            nodes=(audio, vision, thinker),
            streams=(),
            talker={},
            code2wav={},
            thinker=_thinker_walks(config, audio, vision, thinker, None, None),
        )
    talker, code2wav = _talker(config), _code2wav(config)
    states = Stream("media_states", into=(talker, "states"), chunk=FixedChunk(1))
    text = Stream(
        "text_ids", into=(talker, "text"), chunk=FixedChunk(1, after_end="empty"), reject=(config.ids.im_end,)
    )
    codes = Stream("codec_frames", into=(code2wav, "codes"), chunk=_windows())
    return OmniGraph(
        nodes=(audio, vision, thinker, talker, code2wav),
        streams=(states, text, codes),
        thinker=_thinker_walks(config, audio, vision, thinker, states, text),
        talker=_talker_walks(config, talker, states, text, codes),
        code2wav={"code2wav_chunk": Loop("chunks", _decode_window(code2wav), over=codes)},
    )


def _windows() -> LeftContext:
    return LeftContext(
        CODEC_CHUNK,
        CODEC_LEFT,
        first=CODEC_FIRST,
        chunk_from="codec_chunk_frames",
        left_from="codec_left_context_frames",
        first_from="codec_first_frames",
    )


def _decode_window(code2wav: NodeSpec) -> GraphNode:
    return GraphNode(code2wav, ("codes", STEP, *WINDOW), (GraphEdge("pcm", CLIENT, modality="audio"),))


def _encoders(config: OmniConfig) -> tuple[NodeSpec, NodeSpec]:
    audio = NodeSpec(
        name="audio_encoder",
        engine=STATELESS,
        weight_bytes=1_296_000_000,
        ports={"audio": "f32[c,s]", CONTINUES: "b8[1]?", "embeds": f"any[n,{config.audio.output}]"},
        batch_key=(),
        ragged=("audio",),
        doc="16 kHz samples [1, s], or log-mel frames [bins, s], to 13 vectors per second. continues: the frames are "
        "one of several attention windows of a sound, and not the first",
    )
    levels = len(config.vision.deepstack)
    vision = NodeSpec(
        name="vision_encoder",
        engine=STATELESS,
        weight_bytes=1_077_000_000,
        ports={
            "pixels": "any",  # patches [p, values], or a decoded image [y, x, 3]
            "grid": "i64[3]",
            "tokens": "i64[n]",
            "sound": "any[a,d]?",
            "embeds": f"any[n,{config.vision.output}]",
            "deepstack": f"any[{levels},n,{config.vision.output}]",
        },
        batch_key=(),
        ragged=("pixels", "grid", "tokens", "sound"),
        doc="an image or patches of a video to one vector per token, and deep feature maps. Vectors of a video's sound "
        "are put at their tokens",
    )
    return audio, vision


def parallel_sizes(sizes: DecoderSizes) -> tuple[tuple[str, int], ...]:
    """Return the sizes of a decoder that a tp_size must divide."""
    divided = (("heads", sizes.heads), ("values of an expert", sizes.mlp))
    return (*divided, ("values of the shared expert", sizes.shared_mlp)) if sizes.shared_mlp else divided


def _thinker(config: OmniConfig) -> NodeSpec:
    sizes = config.thinker
    return NodeSpec(
        name="Thinker",
        engine=KV_CACHE,
        weight_bytes=61_065_000_000,
        quantized_bytes=59_794_000_000,
        ports={
            "tokens": "i64[n]",
            "positions": "f32[3,n]",
            "embeds": f"any[n,{sizes.width}]?",
            "deepstack": f"any[{len(config.vision.deepstack)},n,{sizes.width}]?",
            "token": "i64[1]",
            "states": f"any[n,{sizes.width}]",
        },
        kv=KVSpec(
            layers=sizes.layers,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            # The talker reads them of all media of the conversation, whether or not the thinker has them cached.
            attached=(Attachment("states", sizes.width),) if config.has_speech else (),
        ),
        sampling=Sampling(port="token", vocab=sizes.vocab, is_text=True),
        sequence=("tokens", "token"),
        hints=EngineHints(capture_prompts=PROMPT_TOKENS),
        tensor_parallel=True,
        parallel_sizes=parallel_sizes(sizes),
        doc="text model. states: the hidden states of media tokens that enter a middle layer, for the talker",
    )


def _talker(config: OmniConfig) -> NodeSpec:
    sizes, stop = config.talker, config.codec.eos
    return NodeSpec(
        name="Talker",
        engine=KV_CACHE,
        weight_bytes=7_272_000_000,
        quantized_bytes=6_480_000_000,
        ports={
            "tokens": "i64[n]?",
            "states": f"any[o,n,{config.thinker.width}]?",
            "positions": "f32[3,n]",
            "text": "i64[1]?",
            "code0": "i64[1]",
            "last_hidden": f"any[{sizes.width}]",
            "text_ended": "b8[1]",
            "frame": f"i64[{config.groups}]",
            "random": f"f32[{config.groups - 1}]",
            "voice": "i64",
            "code_predictor_temperature": "f32",
            "code_predictor_top_k": "i64",
            "code_predictor_top_p": "f32",
        },
        kv=KVSpec(layers=sizes.layers, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim),
        sampling=Sampling(
            port="code0",
            prefix="talker_",
            history="output",
            suppress=(range(sizes.vocab - SPECIAL_CODES, stop), range(stop + 1, sizes.vocab)),
        ),
        sequence=("tokens", "states"),
        hints=EngineHints(capture_prompts=PROMPT_TOKENS),
        tensor_parallel=True,
        parallel_sizes=parallel_sizes(sizes),
        doc="speech model with its residual code predictor. A step completes the frame of the last code, reads it with "
        "the next text id, and draws the first code of the next frame",
    )


def _code2wav(config: OmniConfig) -> NodeSpec:
    return NodeSpec(
        name="Code2Wav",
        engine=STATELESS,
        weight_bytes=432_000_000,
        ports={
            "codes": f"i64[n,{config.groups}]",
            "pcm": "i16[s]",
            "codec_first_frames": "i64",
            "codec_chunk_frames": "i64",
            "codec_left_context_frames": "i64",
        },
        batch_key=("codes",),
        doc="frames with left context to gapless sound: 1920 samples per new frame, 555 fewer in the first piece",
    )


def _thinker_walks(
    config: OmniConfig, audio: NodeSpec, vision: NodeSpec, thinker: NodeSpec, states: Stream | None, text: Stream | None
) -> dict[str, Walk]:
    word = GraphEdge("token", CLIENT, modality="text")
    write = (word,) if text is None else (word, StreamingGraphEdge("token", text))
    tell = write if states is None else (*write, StreamingGraphEdge("states", states))
    hear = GraphNode(audio, ("audio", CONTINUES), (GraphEdge("embeds", thinker),))
    listen = GraphNode(thinker, ("tokens", "embeds"), tell)
    listen_placed = GraphNode(thinker, ("tokens", "positions", "embeds"), tell, attend=PLACED)
    see = GraphNode(
        vision, ("pixels", "grid", "tokens"), (GraphEdge("embeds", thinker), GraphEdge("deepstack", thinker))
    )
    hear_too = GraphNode(audio, ("audio",), (GraphEdge("embeds", vision, into="sound"),))
    watch = GraphNode(
        vision, ("pixels", "grid", "tokens", "sound"), (GraphEdge("embeds", thinker), GraphEdge("deepstack", thinker))
    )
    look = GraphNode(thinker, ("tokens", "positions", "embeds", "deepstack"), tell, attend=PLACED)
    return {
        "prefill_text": GraphNode(thinker, ("tokens",), write),
        "prefill_placed_text": GraphNode(thinker, ("tokens", "positions"), write, attend=PLACED),
        "prefill_audio": Sequential(hear, listen),
        "prefill_placed_audio": Sequential(hear, listen_placed),
        "prefill_vision": Sequential(see, look),
        "prefill_audio_vision": Sequential(hear_too, watch, look),
        "thinker_decode": Loop(
            "thinker_loop",
            GraphNode(thinker, ("token",), write),
            carry={"token": "token"},
            stop=StopOn("token", (config.ids.im_end,), unless="ignore_eos"),
        ),
    }


def _talker_walks(config: OmniConfig, talker: NodeSpec, states: Stream, text: Stream, codes: Stream) -> dict[str, Walk]:
    speak = (StreamingGraphEdge("frame", codes),)
    carried = ("code0", "last_hidden", "text_ended")
    step = GraphNode(talker, (*carried, "text", RANDOM, *PREDICTOR), speak, attend=Attend(tokens=1))
    return {
        "talker_prefill_text": GraphNode(talker, ("tokens",)),
        "talker_prefill_media": GraphNode(talker, ("states",)),
        "talker_prefill_placed_media": GraphNode(talker, ("states", "positions"), attend=PLACED),
        "talker_last_prefill": GraphNode(talker, ("text", from_param("voice")), attend=Attend(tokens=OPENING)),
        "talker_decode": Loop(
            "talker_loop",
            step,
            over=text,
            carry={name: name for name in carried},
            stop=StopOn("code0", (config.codec.eos,)),
        ),
    }
