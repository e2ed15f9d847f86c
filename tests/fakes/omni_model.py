"""A model of every modality and route for api tests: no weights, a chat template, real media."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Pillow

from mstar_core.graph import CLIENT, KV_CACHE, GraphEdge, GraphNode, KVSpec, NodeSpec, Sampling
from mstar_core.plugin import (
    Audio,
    Image,
    ModelSpec,
    Partition,
    ProgramRequest,
    Run,
    Surface,
    TensorData,
    Text,
    Video,
    param,
)
from mstar_core.plugin.chat.turns import Turn
from mstar_core.plugin.media import VideoFile, encode_image, read_image, read_sound
from mstar_core.plugin.processor import Inputs, KeptMedia, PromptRequest, SegmentInputs, content_key
from mstar_core.plugin.program import ProgramGenerator
from tests.fakes.speech_model import Utf8

RATE = 24000
HEARD = 16000


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    temperature: float = param(0.7, "of text; 0 is greedy", ge=0, le=2, openai="temperature")
    talker_temperature: float = param(0.9, "of sound", ge=0, le=2, openai="speech:temperature")
    top_p: float = param(1.0, "nucleus mass", gt=0, le=1, openai="top_p")
    max_output_tokens: int = param(64, "ids", ge=1, openai="max_tokens", aliases=("limit",))
    voice: str = param("ethan", "speaker", choices=("ethan", "chelsie"), openai="voice")
    width: int = param(16, "pixels", ge=8, le=64)
    height: int = param(8, "pixels", ge=8, le=64)
    frames: int = param(2, "frames taken from a video", ge=1, le=1000)
    think: bool = param(False, "think before the answer")
    grid: tuple[float, ...] | None = param(None, "numbers", ge=0, le=1, max_items=2)
    seed: int | None = param(None, "seed", ge=0, le=2**63 - 1, openai="seed")


def program(request: ProgramRequest) -> ProgramGenerator:
    yield Run("answer", tokens=request.inputs["tokens"])


LM = NodeSpec(
    name="LM",
    engine=KV_CACHE,
    ports={"tokens": "i64[n]", "token": "i64[1]"},
    kv=KVSpec(layers=1, kv_heads=1, head_dim=8),
    sampling=Sampling(port="token"),
)
ANSWER = GraphNode(LM, ("tokens",), (GraphEdge("token", CLIENT, modality="text"),))

SPEC = ModelSpec(
    name="fake_omni",
    title="Fake omni",
    plugin="fake",
    inputs=(Text(), Image(max_count=2), Audio(rate=HEARD), Video(), TensorData()),
    outputs=(Text(), Audio(rate=RATE), Image()),
    params=Params,
    routes=frozenset({"chat", "speech", "image", "image_edit", "transcription"}),
    surfaces={
        "image": Surface(beside=("text",), params={"max_output_tokens": 9}),
        "image_edit": Surface(beside=("text",)),
        "transcription": Surface(
            instruction="Write down the {language} speech.",
            instruction_without_language="Write down the speech.",
            params={"temperature": 0.0},
        ),
    },
    nodes=(LM,),
    partitions=(Partition(name="LM", program=program, walks={"answer": ANSWER}),),
    processor="tests.fakes.omni_model:Processor",
)

TEXT_ONLY = replace(
    SPEC, name="fake_text", inputs=(Text(),), outputs=(Text(),), routes=frozenset({"chat"}), surfaces={}
)


def _segment(modality: str) -> SegmentInputs:
    """Return a segment of three tokens. A video brings its sound along."""
    if modality == "video":
        return SegmentInputs(kind="audio_video", arrays={}, length=3, counts={"video": 2, "audio": 1})
    return SegmentInputs(kind=modality, arrays={}, length=3)


def offers(request: PromptRequest) -> str:
    """Return what stands before the turns: the tools with the mode of their choice, and the template's variables."""
    tools = " ".join([*(tool.name for tool in request.tools), request.tool_choice.mode])
    variables = "".join(f"[{name} {value}]" for name, value in request.template.items())
    return (f"[tools {tools}]" if request.tools else "") + variables


class Processor:
    """One id per byte of the formatted prompt; media become words with their size.

    It keeps images of sessions, and then notes as the fact `decoded` how many of a request it has decoded.
    """

    def __init__(self, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        self.kwargs = model_kwargs
        self._kept: dict[int, KeptMedia] = {}

    def process_prompt(self, request: PromptRequest) -> Inputs:
        self._kept = {}
        turns = request.turns
        if turns:
            laid = offers(request) + "".join(self._turn(request, turn) for turn in turns) + "<assistant>"
        else:
            laid = self._words(request, request.order)
        ids = np.frombuffer(laid.encode(), dtype=np.uint8).astype(np.int64)
        media = [_segment(part.modality) for part in request.media]
        facts = {"decoded": len(self._kept)} if request.keeps_media else {}
        return Inputs(
            arrays={"tokens": ids}, segments=media, prompt_tokens=len(ids), facts=facts, kept=dict(self._kept)
        )

    def postprocess(self, output: np.ndarray, modality: str) -> tuple[bytes, dict[str, Any]]:
        if modality == "image":
            height, width = output.shape[:2]
            return encode_image(Pillow.fromarray(output)), {"width": width, "height": height}
        return (output * 32767).astype("<i2").tobytes(), {}

    def detokenizer(self) -> Utf8:
        return Utf8()

    def _turn(self, request: PromptRequest, turn: Turn) -> str:
        thought = f"({turn.reasoning})" if turn.reasoning else ""
        answered = f"[{turn.name} {turn.call_id}]" if turn.role == "tool" else ""
        calls = "".join(f"[{call.name} {call.id} {call.arguments}]" for call in turn.calls)
        return f"<{turn.role}>{thought}{answered}{self._words(request, turn.order)}{calls}"

    def _words(self, request: PromptRequest, order: Any) -> str:
        return "".join(self._word(request, modality, index) for modality, index in order)

    def _size(self, request: PromptRequest, number: int) -> list[int]:
        part = request.media[number]
        key = content_key("image", part.data)
        if part.kept is not None and part.kept.content == key:
            return list(part.kept.arrays["size"])
        size = np.array(read_image(part.data, request.limits).size)
        if request.keeps_media:
            self._kept[number] = KeptMedia(content=key, arrays={"size": size})
        return list(size)

    def _word(self, request: PromptRequest, modality: str, index: int) -> str:
        if modality == "text":
            return request.text_at(index)
        data, limits = request.media_at(modality, index).data, request.limits
        match modality:
            case "image":
                width, height = self._size(request, request.number_of(modality, index))
                return f"[image {width}x{height}]"
            case "audio":
                return f"[audio {len(read_sound(data, HEARD, limits))}]"
            case "video":
                with VideoFile(data, limits) as video:
                    shapes = [frame.shape for frame in video.frames(range(request.params.frames))]
                return f"[video {len(shapes)}x{shapes[0][1]}x{shapes[0][0]}]"
            case _:
                return f"[{modality} {len(data)}]"
