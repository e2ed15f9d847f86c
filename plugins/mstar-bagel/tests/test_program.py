"""Many answers about images begin one after the other: real scheduler and worker, nodes that take virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mstar_bagel.checkpoint.config import Sizes
from mstar_bagel.nodes.vision import MOST_VALUES
from mstar_bagel.plugin import spec
from mstar_core.conformance.clock import FakeClock
from mstar_core.conformance.fake_api import SampleRequest
from mstar_core.conformance.nodes import BuiltNode, RuntimeSettings
from mstar_core.conformance.runtime import LocalRuntime
from mstar_core.plugin.processor import Inputs, MediaPart, PromptRequest, SegmentInputs

SIDE, PATCHES, TEXT = 518, 37 * 37, 19
VOCAB, IDS = 8, 12
MOST_TURNS = 4000


@dataclass
class Device:
    """The one device of all nodes. Times are near those of the official shapes. steps: kind and size of each."""

    clock: FakeClock = field(default_factory=FakeClock)
    steps: list[tuple[str, int]] = field(default_factory=list)

    def run(self, kind: str, size: int, seconds: float) -> None:
        self.steps.append((kind, size))
        self.clock.sleep(seconds)

    def count(self, kind: str) -> int:
        return sum(each == kind for each, _ in self.steps)


class Language(nn.Module):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def forward(
        self, *, kv: Any, positions: Tensor, tokens: Tensor | None = None, embeds: Any = None, **_: Any
    ) -> dict[str, Tensor]:
        if embeds is not None:
            self._device.run("image", len(embeds), 20e-6 * len(positions))
            return {}
        self._device.run("text", len(positions), 0.0045)
        return {"hidden": torch.zeros(len(positions), 2)}

    def head(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(torch.full((len(hidden),), 3), VOCAB).float()


class Vision(nn.Module):
    device_outputs = ("features",)
    most_values = MOST_VALUES

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def forward(self, *, image: Any) -> dict[str, list[Tensor]]:
        self._device.run("encoder", len(image), 0.0042 * len(image))
        return {"features": [torch.zeros(PATCHES, 2) for _ in image]}


class Processor:
    def process_prompt(self, request: PromptRequest) -> Inputs:
        image = SegmentInputs(
            kind="image", arrays={"vit_image": np.zeros((3, SIDE, SIDE), dtype=np.uint8)}, length=PATCHES + 2
        )
        text = SegmentInputs(kind="text", arrays={"tokens": np.ones(TEXT, dtype=np.int64)}, length=TEXT)
        segments = [*([image] * len(request.media)), text]
        tokens = sum(segment.length for segment in segments)
        return Inputs(segments=segments, prompt_tokens=tokens, max_output_tokens=IDS)

    def postprocess(self, output: np.ndarray, modality: str) -> tuple[bytes, dict[str, Any]]:
        return output.tobytes(), {}

    def detokenizer(self) -> Any:
        return Words()


class Words:
    def push(self, ids: Any) -> str:
        return "x" * len(ids)

    def flush(self) -> str:
        return ""


def served(folder: Path) -> tuple[LocalRuntime, Device]:
    sizes = Sizes()
    narrow = replace(sizes.language, layers=1, heads=1, kv_heads=1, head_dim=2, width=2, vocab=VOCAB)
    model, device = spec(replace(sizes, language=narrow)), Device()
    modules = {"LLM": Language(device), "vit_encoder": Vision(device)}
    built = {
        node.name: BuiltNode(
            node=node, module=modules.get(node.owner.name, nn.Module()), vocab=VOCAB if node.sampling else 0
        )
        for node in model.nodes
    }
    settings = RuntimeSettings(slots=48, lookahead=1, page_size=64, max_seq_len=2048, prefix_cache=False)
    runtime = LocalRuntime(model, folder, settings, built=built, processor=Processor())
    runtime.clock.tick, device.clock = 0.0, runtime.clock
    return runtime, device


def question(*, sees: bool = True) -> SampleRequest:
    media = (MediaPart(modality="image", data=b""),) if sees else ()
    order = ((("image", 0),) if sees else ()) + (("text", 0),)
    return SampleRequest(text="x", media=media, order=order, outputs=("text",), params={"ignore_eos": True})


def test_first_tokens_do_not_wait_for_the_images_of_later_requests(tmp_path: Path) -> None:
    runtime, device = served(tmp_path)
    calls, passes, ended = [runtime.send(question()) for _ in range(12)], dict[int, int](), set[int]()
    for _ in range(MOST_TURNS):
        runtime.step()
        for number, call in enumerate(calls):
            if call.items:
                passes.setdefault(number, device.count("image"))
            if call.outcome is not None:
                assert call.outcome.status == "finished", call.outcome.cause
                ended.add(number)
        if len(ended) == len(calls):
            break
    assert len(ended) == len(calls)
    assert max(size for kind, size in device.steps if kind == "image") == 2, "two images of this size fill the device"
    assert max(size for kind, size in device.steps if kind == "encoder") == 2, "as many are encoded at once"
    late = {number: count for number, count in passes.items() if count > number // 2 + 3}
    assert not late, "a first token waits for the passes before its own and at most two behind it"
    kinds = [kind for kind, _ in device.steps if kind != "encoder"]
    first, last = kinds.index("image"), len(kinds) - kinds[::-1].index("image")
    pairs = list(zip(kinds[first:last], kinds[first + 1 : last], strict=False))
    assert ("image", "image") not in pairs[2:], "text runs between passes over images"
    decodes = [0]
    for kind, size in device.steps[: len(device.steps) - [each for each, _ in device.steps][::-1].index("image")]:
        if kind == "image":
            decodes.append(0)
        decodes[-1] += kind == "text" and size % TEXT > 0  # prompts have no other size
    assert max(decodes) == 1, "the decode batch runs once between two of them"
    assert runtime.leaks() == []


def test_a_text_that_came_first_does_not_wait_for_images(tmp_path: Path) -> None:
    runtime, device = served(tmp_path)
    text = runtime.send(question(sees=False))
    seen = [runtime.send(question()) for _ in range(4)]
    while not text.items:
        assert runtime.steps < MOST_TURNS
        runtime.step()
    assert device.count("image") <= 1
    runtime.run()
    assert all(call.outcome is not None and call.outcome.status == "finished" for call in (text, *seen))
