"""A model of every modality for client tests: it returns its inputs and fixed outputs."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from mstar_core.messages.requests import NewRequest
from mstar_core.plugin import Action, Audio, Image, ModelSpec, Scalar, TensorData, Text, Video, param
from mstar_core.plugin.processor import Inputs, PromptRequest
from tests.fakes.conductor import FakeDeployment
from tests.fakes.speech_model import RATE
from tests.fakes.speech_model import SPEC as SPEECH
from tests.fakes.speech_model import Processor as SpeechProcessor

ACTIONS: Final = np.arange(6, dtype=np.float32).reshape(3, 2) / 4
LATENTS: Final = np.arange(24, dtype=np.float32).reshape(2, 3, 4) - 5
SCALAR: Final = np.array([7], dtype=np.int64)
SOUND: Final = np.arange(-3000, 3000, dtype=np.int16)
WORDS: Final = "hé\u2028llo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    voice: str = param("tara", "speaker", choices=("tara", "leo"), openai="voice")
    temperature: float = param(0.6, "0 is greedy", ge=0, le=2, openai="temperature")
    max_output_tokens: int = param(100, "ids", ge=1, le=4096)
    seed: int | None = param(None, "seed", ge=0)
    robot_state: tuple[float, ...] | None = param(None, "joint values")
    task: str | None = param(None, "what to do", choices=("encode", "rollout", "plan"))
    actions: object = param(None, "numbers")
    states: object = param(None, "numbers")


SPEC: Final[ModelSpec] = dataclasses.replace(
    SPEECH,
    name="fake_any",
    inputs=(Text(), Image(), Audio(), Video(), TensorData()),
    outputs=(Text(), Audio(rate=RATE, channels=1), Image(), Video(), Action(), Scalar(), TensorData()),
    params=Params,
    processor="tests.fakes.any_model:Processor",
)


class Processor(SpeechProcessor):
    """Processor whose warnings list its inputs in order: modality, name, and the first digits of their SHA-256."""

    def __init__(self, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        super().__init__(folder, model_kwargs)

    def process_prompt(self, request: PromptRequest) -> Inputs:
        made = super().process_prompt(request)
        read = [facts(part.modality, part.name, part.data) for part in request.media]
        order = ",".join(f"{modality}{index}" for modality, index in request.order)
        return dataclasses.replace(
            made, max_output_tokens=request.params.max_output_tokens, warnings=[*read, f"order {order}"]
        )

    def postprocess(self, output: np.ndarray, modality: str) -> tuple[bytes, dict[str, Any]]:
        if modality == "image":
            return png(output), {"width": output.shape[1], "height": output.shape[0], "seed": 3}
        if modality == "video":
            return output.tobytes(), {"shape": list(output.shape), "dtype": "float32", "name": "latents"}
        return super().postprocess(output, modality)


def facts(modality: str, name: str, data: bytes) -> str:
    """Return the description of a file."""
    return f"{modality} {name} {hashlib.sha256(data).hexdigest()[:8]}"


def png(gray: np.ndarray) -> bytes:
    """Return a PNG with one byte per pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = gray.shape
    rows = b"".join(b"\0" + row.tobytes() for row in gray)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


PIXELS: Final = np.arange(20, dtype=np.uint8).reshape(4, 5)


def everything(fake: FakeDeployment, request: NewRequest) -> None:
    """Script: one output of each requested kind, then the end."""
    made: dict[str, Any] = {"image": PIXELS, "video": LATENTS, "action": ACTIONS, "scalar": SCALAR, "tensor": LATENTS}
    for modality in request.outputs:
        match modality:
            case "text":
                fake.text(request.handle, WORDS.encode())
            case "audio":
                fake.output(request.handle, "audio", SOUND[:2048])
                fake.output(request.handle, "audio", SOUND[2048:])
            case other:
                fake.output(request.handle, other, made[other])
    fake.finish(request.handle, token=5)
