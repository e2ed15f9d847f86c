"""Image steps in fixed shapes, as they are captured on a GPU, give the velocities of plain forwards."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar_bagel.checkpoint.config import Autoencoder, ControlIds, Language, Sizes, Vision
from mstar_bagel.graph import IMAGE, IMAGE_BUCKETS, LOOK, build
from mstar_bagel.nodes.language import BagelLLM
from mstar_bagel.nodes.vision import ImageFeatures
from mstar_bagel.plugin import mstar_models
from mstar_core.engine.base import Handle, Job, JobKey
from mstar_core.engine.cuda_graphs.cache import CaptureSizes, GraphCache
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.kv.settings import KVSettings
from mstar_core.errors import ConfigError
from mstar_core.graph.declare.nodes import STEP, Attend
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.layers.linear import fuse_projections

SIZES = Sizes(
    language=Language(width=1024, layers=2, heads=8, kv_heads=2, head_dim=128, mlp=1024, vocab=100),
    vision=Vision(width=64, layers=1, heads=4, mlp=64),
    vae=Autoencoder(width=32, multipliers=(1, 1, 1, 1), blocks=1, channels=16),
    ids=ControlIds(start=90, end=91, image_start=92, image_end=93),
)
TIMES = torch.tensor([[0.9, 0.1, 0], [0.8, 0.1, 1]])
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BUDGETS = {"cpu": 1e-5, "cuda": 0.03}


def engine_of(device: str, *, is_captured: bool, captures_images: bool = False, budget: int = 64) -> KVCacheEngine:
    torch.manual_seed(3)
    on_gpu, dtype = device == "cuda", torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        module = BagelLLM(SIZES).to(dtype).eval().requires_grad_(False)
    module.latent_pos_embed.pos_embed.data.normal_()
    module.language_model.model.rotary.frequencies = module.language_model.model.rotary.frequencies.float()
    fuse_projections(module)
    settings = KVSettings(
        device=torch.device(device),
        dtype=dtype,
        attention="flashinfer" if on_gpu else "torch",
        vocab=100,
        lookahead=int(on_gpu),
        prefix_cache=False,
        graphs=CaptureSizes(decode=(1,)) if is_captured else CaptureSizes(),
        num_pages=256,
        page_size=16,
        max_slots=12,
        max_seq_len=1024,
        token_budget=budget,
    )
    graph = build(SIZES, captures_images=captures_images)
    spec = next(node for node in graph.nodes if node.name == "LLM")
    return KVCacheEngine(spec, module, settings)


class Painter:
    """Submits passes of images, main and the branch without a prompt, and collects their velocities.

    steps: steps of the engine that computed passes in the last call of `step`.
    """

    def __init__(self, engine: KVCacheEngine) -> None:
        self.engine = engine
        self.keys = 0
        self.steps = 0

    def open(self, handle: int, prompt: int) -> None:
        self.engine.open(Handle(handle), SamplingParams(), 128)
        self.submit(handle, {"tokens": torch.arange(prompt)})
        self._run()

    def step(self, latents: dict[int, Tensor], step: int) -> dict[tuple[int, str], Tensor]:
        """Return the velocities of one step, by handle and branch."""
        expected: dict[int, tuple[int, str]] = {}
        for handle, x in latents.items():
            for branch in ("main", "cfg_text"):
                inputs = {"latents": x, "times": TIMES, STEP: torch.tensor(step)}
                key = self.submit(handle, inputs, branch=branch, attend=LOOK, outputs=("velocity",))
                expected[key] = (handle, branch)
        ended = [done for done in self._run() if int(done.job.key) in expected]
        return {expected[int(done.job.key)]: done.outputs["velocity"].clone() for done in ended}

    def submit(self, handle: int, inputs: dict[str, Tensor], *, sample: bool = False, **fields: Any) -> int:
        self.keys += 1
        self.engine.submit(Job(key=JobKey(self.keys), handle=Handle(handle), inputs=inputs, sample=sample, **fields))
        return self.keys

    def _run(self) -> list[Any]:
        ended = []
        self.steps = 0
        while (running := self.engine.launch()) is not None:
            result = self.engine.collect(running)
            assert not result.failed, result.failed[0].error
            ended += result.done
            self.steps += any("velocity" in done.outputs for done in result.done)
        return ended


@pytest.mark.parametrize("device", DEVICES)
def test_a_captured_image_encoder_equals_the_plain_one(device: str) -> None:
    torch.manual_seed(5)
    with torch.inference_mode(), torch.device(device):
        plain = ImageFeatures(SIZES).to(torch.bfloat16 if device == "cuda" else torch.float32).eval()
        plain.vit_pos_embed.pos_embed.data.normal_()
        captured = copy.deepcopy(plain)
        captures = GraphCache(torch.device(device))
        captured.capture(captures)
        for _ in range(2):
            image = torch.rand(3, 4 * 14, 6 * 14) * 2 - 1
            expected, actual = (each(image=[image])["features"][0] for each in (plain, captured))
            assert float((actual.float() - expected.float()).norm() / expected.float().norm()) < BUDGETS[device]
            while captured.idle():
                pass
        assert captures.counts.hits == 1
        both = captured(image=[image, image])["features"]
        assert float((both[1].float() - expected.float()).norm() / expected.float().norm()) < BUDGETS[device]


def test_branches_of_an_image_share_a_forward() -> None:
    with torch.inference_mode():
        painter = Painter(engine_of("cpu", is_captured=False))
        painter.open(1, 20)
        x = {1: torch.randn(6, 8, SIZES.latent_width)}
        painter.step(x, 0)
        assert painter.steps == 1


@pytest.mark.parametrize("device", DEVICES)
def test_captured_image_steps_equal_plain_ones(device: str) -> None:
    with torch.inference_mode():
        plain, captured = (Painter(engine_of(device, is_captured=each)) for each in (False, True))
        images = {1: torch.randn(4, 6, SIZES.latent_width), 2: torch.randn(4, 6, SIZES.latent_width)}
        images = {handle: x.to(device) for handle, x in images.items()}
        for painter in (plain, captured):
            painter.open(1, 20)
            painter.open(2, 7)
        captured.step(images, 0)
        while captured.engine.idle():
            pass
        before = captured.engine.counters()["graph_hits"]
        for step, inputs in enumerate((images, {1: images[1]})):
            expected, actual = (painter.step(inputs, step) for painter in (plain, captured))
            assert expected.keys() == actual.keys() and len(actual) == 2 * len(inputs)
            for key, velocity in actual.items():
                away = (velocity - expected[key]).norm() / expected[key].norm()
                assert float(away) < BUDGETS[device], key
        assert captured.engine.counters()["graph_hits"] > before


# -- images of prompts -------------------------------------------------------------------------------------------------

PICTURES = {1: 60, 2: 85, 3: 85, 4: 70}
"""Features of each request's image. Together they fill the smallest bucket, and none does alone."""


class Reader:
    """Reads an image per request, then a text, whose logits it returns.

    forms: dimensions and tokens of the features of each forward over images.
    """

    def __init__(self, device: str, *, captures_images: bool) -> None:
        self.engine = engine_of(device, is_captured=True, captures_images=captures_images, budget=512)
        self.painter = Painter(self.engine)
        self.forms: list[tuple[int, int]] = []
        self._handle = 0
        module: Any = self.engine.node_memory().module
        module.register_forward_pre_hook(self._note, with_kwargs=True)

    def read(self, pictures: Sequence[Tensor], text: int = 0) -> list[Tensor]:
        """Return the logits behind each picture, all submitted at once. text: tokens of a text before them."""
        self.forms.clear()
        handles = range(self._handle + 1, self._handle + 1 + len(pictures))
        self._handle += len(pictures)
        for handle in handles:
            self.engine.open(Handle(handle), SamplingParams(), 512)
            if text:
                self.painter.submit(handle, {"tokens": torch.arange(text)})
        self.painter._run()
        for handle, picture in zip(handles, pictures, strict=True):
            self.painter.submit(handle, {"embeds": picture}, attend=IMAGE)
        self.painter._run()
        keys = [
            self.painter.submit(handle, {"tokens": torch.arange(5)}, outputs=("logits",), attend=Attend(mask="causal"))
            for handle in handles
        ]
        ended = {int(done.job.key): done.outputs["logits"].float().cpu() for done in self.painter._run()}
        for handle in handles:
            self.engine.close(Handle(handle))
        return [ended[key] for key in keys]

    def _note(self, module: Any, given: Any, named: dict[str, Any]) -> None:
        embeds = named.get("embeds")
        if isinstance(embeds, Tensor):
            self.forms.append((embeds.dim(), embeds.shape[0]))
        elif embeds is not None:
            self.forms.append((3, len(embeds)))

    def capture(self) -> None:
        while self.engine.idle():
            pass


def pictures(device: str, counts: Sequence[int] = tuple(PICTURES.values())) -> list[Tensor]:
    torch.manual_seed(11)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return [torch.randn(count, SIZES.language.width, device=device).to(dtype) for count in counts]


def check_near(actual: Sequence[Tensor], expected: Sequence[Tensor], device: str) -> None:
    for one, two in zip(actual, expected, strict=True):
        assert float((one - two).norm() / two.norm()) < BUDGETS[device]


@pytest.mark.parametrize("device", DEVICES)
def test_images_of_several_prompts_share_a_forward_and_read_as_alone(device: str) -> None:
    with torch.inference_mode():
        reader = Reader(device, captures_images=False)
        together = reader.read(pictures(device))
        assert reader.forms == [(3, len(PICTURES))], "one forward, whose features come by image"
        alone = [reader.read([picture])[0] for picture in pictures(device)]
        check_near(together, alone, device)


@pytest.mark.parametrize("device", DEVICES)
def test_captured_passes_over_images_equal_plain_ones(device: str) -> None:
    with torch.inference_mode():
        plain, captured = (Reader(device, captures_images=each) for each in (False, True))
        expected = plain.read(pictures(device))
        check_near(captured.read(pictures(device)), expected, device)
        assert captured.forms == [(3, len(PICTURES))], "the first pass of a kind is not captured yet"
        captured.capture()
        before = captured.engine.counters()["graph_hits"]
        actual = captured.read(pictures(device))
        assert captured.engine.counters()["graph_hits"] > before
        if device == "cpu":  # a graph on a GPU calls no module
            assert captured.forms == [(2, IMAGE_BUCKETS[0])], "packed, with padding"
        check_near(actual, expected, device)
        # Padding keeps tokens of the replay before, which no other image may read.
        fewer = pictures(device, (60, 85, 100))[::-1]
        check_near(captured.read(fewer), plain.read(fewer), device)


def test_images_that_would_be_mostly_padding_or_follow_a_text_run_uncaptured() -> None:
    with torch.inference_mode():
        plain, captured = (Reader("cpu", captures_images=each) for each in (False, True))
        captured.read(pictures("cpu"))
        captured.capture()
        (one,) = pictures("cpu", (60,))
        check_near(captured.read([one]), plain.read([one]), "cpu")
        assert captured.forms == [(3, 1)], "a bucket five times as large costs more than its launches"
        check_near(captured.read(pictures("cpu"), text=9), plain.read(pictures("cpu"), text=9), "cpu")
        assert captured.forms == [(3, len(PICTURES))], "captured passes over images read no cache"


def test_passes_over_images_are_captured_only_if_a_deployment_asks() -> None:
    with torch.inference_mode():
        reader = Reader("cpu", captures_images=False)
        for _ in range(2):
            reader.read(pictures("cpu"))
            reader.capture()
        assert reader.forms == [(3, len(PICTURES))]


def test_the_option_is_checked() -> None:
    (model,) = mstar_models()
    hints = next(node for node in model.bound(None, {"capture_images": True}).nodes if node.name == "LLM").hints
    assert hints.capture_tokens == IMAGE_BUCKETS
    assert not next(node for node in model.bound(None, {}).nodes if node.name == "LLM").hints.capture_tokens
    for wrong in ({"capture_image": True}, {"capture_images": 1}):
        with pytest.raises(ConfigError, match="capture_image"):
            model.bound(None, wrong)
