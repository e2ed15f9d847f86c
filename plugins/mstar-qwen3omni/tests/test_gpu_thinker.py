"""The thinker on CUDA: the golden vectors in float32, captured steps in bfloat16 at the official layer sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.layers.linear import fuse_projections
from mstar_core.weights.building import building
from mstar_qwen3omni.checkpoint.config import OmniConfig, read_config
from mstar_qwen3omni.thinker.thinker import Thinker

from .thinker_cases import (
    CASES,
    FOLDER,
    STATES,
    Case,
    DenseCache,
    answers,
    golden_thinker,
    made_engine,
    needs_weights,
    prefill,
    read,
)

pytestmark = [pytest.mark.gpu, needs_weights]

CUDA = torch.device("cuda", 0)
WIDE = OmniConfig(thinker=replace(OmniConfig().thinker, layers=4, vocab=4000), accept_layer=3)
"""Layers of the official size, few of them."""


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def on_gpu(case: Case) -> Case:
    return replace(
        case,
        tokens=case.tokens.to(CUDA),
        positions=case.positions.to(CUDA),
        embeds=case.embeds.to(CUDA),
        deepstack=case.deepstack.to(CUDA),
    )


@pytest.mark.parametrize("name", CASES)
def test_float32_equals_the_reference(name: str) -> None:
    thinker, case = golden_thinker().to(CUDA), read(name)
    actual = prefill(thinker, on_gpu(case), DenseCache(), [])
    for port, expected in (("hidden", "thinker_last_hidden"), ("states", "thinker_accept_hidden")):
        torch.testing.assert_close(actual[port].cpu(), case.tensors[expected], atol=STATES, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_is_as_far_from_float32_as_on_the_cpu(name: str) -> None:
    case = read(name)
    exact = prefill(golden_thinker(), case, DenseCache(), [])["hidden"]
    half = prefill(golden_thinker().bfloat16(), case, DenseCache(), [])["hidden"].float()
    module = golden_thinker().to(CUDA, torch.bfloat16)
    fuse_projections(module)
    actual = prefill(module, on_gpu(case), DenseCache(), [])["hidden"].float().cpu()
    errors = [float(((each - exact).norm(dim=-1) / exact.norm(dim=-1)).median()) for each in (half, actual)]
    assert errors[1] < 1.5 * errors[0] + 0.02


@pytest.mark.parametrize("graphs", [CaptureSizes(), CaptureSizes(decode=(1, 8))], ids=["eager", "captured"])
def test_float32_gives_the_answers_of_the_reference(graphs: CaptureSizes) -> None:
    cases = [read(name) for name in CASES]
    settings = {"device": CUDA, "attention": "torch", "graphs": graphs, "lookahead": 1}
    ids, _ = answers(golden_thinker().to(CUDA), cases, **settings)
    assert ids == [case.answer.tolist() for case in cases]


def wide_thinker() -> Thinker:
    with building(CUDA, torch.bfloat16):
        module = Thinker(WIDE)
    torch.manual_seed(4)
    for parameter in module.requires_grad_(False).parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
        else:
            parameter.fill_(1.0)
    fuse_projections(module)
    return module.eval()


def prompts() -> list[Case]:
    """Return text prompts of different lengths with an answer of 24 ids."""
    generator = torch.Generator().manual_seed(9)
    cases = []
    for length in (5, 40, 17, 90, 33):
        tokens = torch.randint(0, WIDE.thinker.vocab, (length,), generator=generator)
        positions = torch.arange(length).float().expand(3, length).contiguous()
        empty = torch.empty(0)
        cases.append(Case({"thinker_tokens": torch.zeros(24)}, tokens, positions, empty, empty))
    return cases


def test_captured_steps_keep_the_sequences_of_a_batch_apart() -> None:
    """In another order each sequence has other rows and pages, and the same ids.

    Alone it may have others in bfloat16: products of other sizes are summed in another order.
    """
    thinker, cases = wide_thinker(), prompts()
    settings = {
        "device": CUDA,
        "dtype": torch.bfloat16,
        "attention": "flashinfer",
        "page_size": 16,
        "num_pages": 200,
        "lookahead": 1,
        "graphs": CaptureSizes(decode=(8,)),
    }
    together, _ = answers(thinker, cases, WIDE, **settings)
    assert all(len(ids) == 24 for ids in together) and len({tuple(ids) for ids in together}) == len(cases)
    order = [3, 0, 4, 2, 1]
    again, _ = answers(thinker, [cases[index] for index in order], WIDE, **settings)
    assert again == [together[index] for index in order]


def test_captured_media_passes_are_as_near_float32_as_eager_ones() -> None:
    """Hidden states of media in bfloat16, which the kernels of both paths round apart."""
    thinker = wide_thinker()
    generator = torch.Generator().manual_seed(2)
    width, levels = WIDE.thinker.width, len(WIDE.vision.deepstack)
    ids = read_config(FOLDER).ids
    cases = []
    for pads in (20, 75, 130):
        tokens = torch.cat([torch.arange(5), torch.full((pads,), ids.image_pad), torch.arange(7)])
        positions = torch.arange(len(tokens)).float().expand(3, -1).contiguous()
        embeds = torch.randn(len(tokens), width, generator=generator)
        deepstack = 0.1 * torch.randn(levels, len(tokens), width, generator=generator)
        cases.append(Case({"thinker_tokens": torch.zeros(3)}, tokens, positions, embeds, deepstack))
    settings = {
        "device": CUDA,
        "dtype": torch.bfloat16,
        "attention": "flashinfer",
        "page_size": 16,
        "num_pages": 200,
        "graphs": CaptureSizes(decode=(4,), prefill=(64,)),
        "prefix_cache": False,
    }
    engine = made_engine(thinker, cases, WIDE, **settings)
    _, eager = answers(thinker, cases, WIDE, engine=engine)
    while engine.idle():
        pass
    before = engine.counters()["prefill_hits"]
    _, captured = answers(thinker, cases, WIDE, engine=engine)
    assert engine.counters()["prefill_hits"] > before
    exact = {**settings, "dtype": torch.float32, "attention": "torch", "graphs": CaptureSizes()}
    _, reference = answers(wide_thinker().float(), cases, WIDE, **exact)

    def error(found: torch.Tensor, expected: torch.Tensor) -> float:
        return float((found.float() - expected).norm() / expected.norm())

    for mine, other, expected in zip(captured, eager, reference, strict=True):
        assert error(mine, expected) < 1.3 * error(other, expected) + 5e-3, (
            error(mine, expected),
            error(other, expected),
        )
