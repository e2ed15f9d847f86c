"""A model that draws an image in steps, and a script that a test advances: steps, partial images, the image."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mstar_core.graph import CLIENT, GraphEdge, GraphNode
from mstar_core.messages.requests import NewRequest
from mstar_core.plugin import Partition, param
from mstar_core.plugin.surface import PARTIAL_IMAGE, PROGRESS
from tests.fakes.conductor import FakeDeployment
from tests.fakes.omni_model import LM, program
from tests.fakes.omni_model import SPEC as OMNI
from tests.fakes.omni_model import Params as OmniParams
from tests.fakes.omni_model import Processor as OmniProcessor

LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(OmniParams):
    partial_images: int = param(0, "images in the making to send in a stream", ge=0, le=3)


DRAW = GraphNode(
    LM,
    ("tokens",),
    (
        GraphEdge("token", CLIENT, modality="text"),
        GraphEdge("progress", CLIENT, modality=PROGRESS),
        GraphEdge("estimate", CLIENT, modality=PARTIAL_IMAGE),
    ),
)

SPEC = replace(
    OMNI,
    name="fake_drawing",
    params=Params,
    nodes=(replace(LM, ports={**LM.ports, "progress": "i64[2]", "estimate": "u8[h,w,3]"}),),
    partitions=(Partition(name="LM", program=program, walks={"answer": DRAW}),),
    processor="tests.fakes.drawing_model:Processor",
)


class Processor(OmniProcessor):
    """Encodes partial images as it encodes images."""

    def postprocess(self, output: np.ndarray, modality: str) -> tuple[bytes, dict[str, Any]]:
        return super().postprocess(output, "image" if modality == PARTIAL_IMAGE else modality)


class Easel:
    """A script whose request waits until the test sends its steps and images. prompt: of the last request."""

    def __init__(self) -> None:
        self.prompt = ""
        self._started = threading.Event()

    def __call__(self, fake: FakeDeployment, request: NewRequest) -> None:
        self._fake, self._request, self._loop = fake, request, asyncio.get_running_loop()
        self.prompt = fake.prompt(request)
        self._started.set()

    def step(self, number: int, steps: int) -> None:
        """Send the progress of the drawing."""
        self._send(PROGRESS, np.array([number, steps], dtype=np.int64))

    def partial(self, value: int) -> None:
        """Send a gray image in the making."""
        self._send(PARTIAL_IMAGE, np.full((8, 16, 3), value, dtype=np.uint8))

    def finish(self, value: int) -> None:
        """Send the gray image and end the request."""
        self._send("image", np.full((8, 16, 3), value, dtype=np.uint8))
        self._loop.call_soon_threadsafe(self._fake.finish, self._request.handle)

    def _send(self, modality: str, array: np.ndarray) -> None:
        assert self._started.wait(LIMIT_S), "the page sent no request"
        self._loop.call_soon_threadsafe(self._fake.output, self._request.handle, modality, array)
