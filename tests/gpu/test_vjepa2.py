"""V-JEPA 2 and 2-AC on CUDA against their references and themselves: float32 and bfloat16, plain and captured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import gelu, layer_norm

from bench.families.policy import Place
from bench.families.world import Rolling, random_nodes, trial
from mstar_core.engine.attention.static import AttentionBuffers
from mstar_core.engine.cuda_graphs.cache import GraphCache
from mstar_core.engine.device import prepare_device
from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape
from mstar_core.worker.start.warmup import warm_module
from mstar_vjepa2.checkpoint.config import ActionConfig, VitConfig, encoder_of
from mstar_vjepa2.nodes.blocks import sum_norm
from mstar_vjepa2.nodes.encoder import FrameEncoder
from mstar_vjepa2.nodes.linear import branch_of, linear, qkv_rotary
from mstar_vjepa2.nodes.rotary import Rotary3D, rotate, rotate_plain
from tests.engine.golden_engines import (
    BFLOAT16,
    FLOAT32,
    Limits,
    check_clips,
    check_world,
    clip_encoder,
    difference,
    world,
)

pytestmark = pytest.mark.gpu

KINDS = [(torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)]
WIDE = ActionConfig(
    encoder=encoder_of(256, 3, 4, 1024),
    predictor=VitConfig(width=256, layers=3, heads=4, inner=1024),
    uses_extrinsics=False,
    most_frames=12,
)
"""The released head size and patches of a frame, in few and narrow blocks."""


def place(cuda: torch.device, dtype: torch.dtype = torch.bfloat16, requests: int = 16) -> Place:
    prepare_device(cuda)
    return Place(device=cuda, dtype=dtype, requests=requests)


@pytest.mark.parametrize(("dtype", "limits"), KINDS, ids=["float32", "bfloat16"])
def test_rollouts_equal_the_reference(dtype: torch.dtype, limits: Limits, cuda: torch.device, tmp_path: Path) -> None:
    """The golden head size is none that FlashInfer has: torch attends."""
    rolling = world(place(cuda, dtype), tmp_path)
    check_world(rolling, limits)
    assert rolling.counters()["ac_predictor"]["graph_hits"] >= 2


@pytest.mark.parametrize(("dtype", "limits"), KINDS, ids=["float32", "bfloat16"])
def test_clips_equal_the_reference(dtype: torch.dtype, limits: Limits, cuda: torch.device, tmp_path: Path) -> None:
    here = place(cuda, dtype)
    check_clips(clip_encoder(here, tmp_path), here, limits, GraphCache(cuda))


@pytest.mark.parametrize("attention", ["torch", "flashinfer"])
@pytest.mark.parametrize("candidates", [1, 5])
def test_captured_rollouts_equal_plain_ones(candidates: int, attention: str, cuda: torch.device) -> None:
    """In bfloat16 at the released shapes of a frame: what differs is the order of sums."""
    here = replace(place(cuda), attention=attention)
    modules, asked = random_nodes(WIDE, here), trial(WIDE, 3, candidates, 6)
    expected = Rolling(WIDE, modules, replace(here, is_captured=False), 12).whole(asked)
    captured = Rolling(WIDE, modules, here, 12)
    captured.whole(asked)
    captured.driver.capture()
    before = captured.counters()["ac_predictor"]["graph_hits"]
    found = captured.whole(asked)
    assert difference(found, expected.cpu(), is_relative=True) < BFLOAT16.frames
    assert captured.counters()["ac_predictor"]["graph_hits"] >= before + 6
    memory = captured.driver.runners["ac_predictor"].memory()
    assert (memory.pages_used, memory.slots_used) == (0, 0)


@pytest.mark.parametrize("attention", ["torch", "flashinfer"])
def test_a_context_in_one_pass_equals_frame_by_frame(attention: str, cuda: torch.device) -> None:
    """Frames are rows of one sequence: those behind read in each layer what those before them append there."""
    here = replace(place(cuda), attention=attention)
    modules, asked = random_nodes(WIDE, here), trial(WIDE, 8, 3, 2)
    single = Rolling(WIDE, modules, replace(here, is_captured=False), 12)
    single.driver.runners["ac_predictor"]._scheduler._loops._most_iterations = 1  # type: ignore[attr-defined]
    expected = single.whole(asked)
    rolling = Rolling(WIDE, modules, here, 12)
    plain = rolling.whole(asked)
    rolling.driver.capture()
    before = rolling.counters()["ac_predictor"]["graph_hits"]
    for found in (plain, rolling.whole(asked)):
        assert difference(found, expected.cpu(), is_relative=True) < BFLOAT16.frames
    assert rolling.counters()["ac_predictor"]["graph_hits"] == before + 3, "seven frames, then two steps of three rows"


@pytest.mark.parametrize("attention", ["torch", "flashinfer"])
@pytest.mark.parametrize(("context", "candidates", "steps"), [(1, 1, 11), (3, 2, 6)])
def test_replays_that_run_ahead_equal_one_for_each_iteration(
    context: int, candidates: int, steps: int, attention: str, cuda: torch.device
) -> None:
    here = replace(place(cuda), attention=attention)
    modules, asked = random_nodes(WIDE, here), trial(WIDE, context, candidates, steps)
    found = []
    for is_ahead in (False, True):
        rolling = Rolling(WIDE, modules, here, 12)
        engine = rolling.driver.runners["ac_predictor"]
        if not is_ahead:
            engine._scheduler._passes._look_ahead = lambda passes: None  # type: ignore[attr-defined]
        for _ in range(2):
            rolling.whole(asked)
            rolling.driver.capture()
        missed = rolling.counters()["ac_predictor"]["graph_misses"]
        found += [rolling.whole(asked), rolling.whole(asked)]
        kinds = engine._runner.graphs.passes.kinds  # type: ignore[attr-defined]
        assert any(kind.runs_ahead for kind in kinds) == is_ahead
        assert rolling.counters()["ac_predictor"]["graph_misses"] == missed
    for each in found[1:]:  # the same kernels in the same order
        assert difference(each, found[0].cpu(), is_relative=True) < 1e-5


def test_a_captured_frame_equals_a_plain_one(cuda: torch.device) -> None:
    node = random_nodes(WIDE, place(cuda))["video_encoder"]
    assert isinstance(node, FrameEncoder)
    pixels = torch.randint(0, 256, (5, 1, 3, 256, 256), dtype=torch.uint8, device=cuda)
    with torch.inference_mode():
        expected = node.encoder.hidden(pixels)
        node.encoder.capture(GraphCache(cuda))
        node.encoder(pixels)
        while node.idle():
            pass
        assert difference(node.encoder(pixels)[0], expected.cpu(), is_relative=True) < BFLOAT16.clips
    assert node.counters()["graph_hits"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "head_dim", "batch"), [(16, 64, 2), (22, 64, 1), (3, 12, 3)])
def test_the_kernel_turns_as_plain_operations_do(
    heads: int, head_dim: int, batch: int, dtype: torch.dtype, cuda: torch.device
) -> None:
    x = torch.randn(batch, 300, 3 * heads, head_dim, device=cuda).to(dtype)
    rotation = Rotary3D(head_dim).to(cuda).of_ids(torch.arange(300, device=cuda), 8, 8)
    for given in (x.clone(), x[0].clone()):
        both, rest = given[..., : 2 * heads, :], given[..., 2 * heads :, :].clone()
        expected = rotate_plain(both.double().float(), rotation)
        found = rotate(both, rotation)
        assert difference(found, expected.cpu(), is_relative=True) < (1e-6 if dtype == torch.float32 else 4e-3)
        assert found.data_ptr() == both.data_ptr() and torch.equal(given[..., 2 * heads :, :], rest)


@pytest.mark.parametrize("rows", [37, 258, 1032])
def test_products_sums_and_norms_against_float64(rows: int, cuda: torch.device) -> None:
    """Turned queries and keys, a layer with GELU and without, one whose slices are summed in front of a norm."""
    wide, narrow = (
        torch.nn.Linear(inputs, outputs, device=cuda, dtype=torch.bfloat16).requires_grad_(False)
        for inputs, outputs in ((1024, 4096), (4096, 1024))
    )
    norm = torch.nn.LayerNorm(1024, 1e-6, device=cuda, dtype=torch.bfloat16).requires_grad_(False)
    torch.nn.init.normal_(norm.weight)
    x, given = (torch.randn(rows, width, device=cuda).bfloat16() for width in (1024, 4096))
    pages = torch.zeros(5, 2, 258, 16, 64, device=cuda, dtype=torch.bfloat16)
    joined = torch.nn.Linear(1024, 3072, device=cuda, dtype=torch.bfloat16).requires_grad_(False)
    at = torch.arange(rows, device=cuda)
    places, rotation = at // 258 * 516 + at % 258, Rotary3D(64).to(cuda).of_ids(at, 16, 16)
    query = qkv_rotary(x, joined, rotation, 16, (pages, places))
    exact = (x.double() @ joined.weight.double().T + joined.bias.double()).view(rows, 48, 64)
    spun = rotate_plain(exact[:, :32].float(), rotation)
    flat = pages.view(-1, 16, 64)
    for found, wanted in ((query, spun[:, :16]), (flat[places], spun[:, 16:]), (flat[places + 258], exact[:, 32:])):
        assert difference(found, wanted.cpu(), is_relative=True) < 5e-3
    for act in (None, gelu):
        exact = x.double() @ wide.weight.double().T + wide.bias.double()
        found = linear(x, wide, act)
        assert difference(found, (exact if act is None else act(exact)).cpu(), is_relative=True) < 4e-3
    summed, normed = sum_norm(x, branch_of(given, narrow), norm)
    exact = x.double() + given.double() @ narrow.weight.double().T + narrow.bias.double()
    assert difference(summed, exact.cpu(), is_relative=True) < 4e-3
    exact = layer_norm(summed.double(), (1024,), norm.weight.double(), norm.bias.double(), 1e-6)
    assert difference(normed, exact.cpu(), is_relative=True) < 4e-3


@pytest.mark.parametrize("splits", [None, 1, 3, 8])
@pytest.mark.parametrize(("rows", "cached"), [(1, [37]), (2, [0, 9]), (9, list(range(9)))])
def test_attention_of_frames_against_float64(
    rows: int, cached: list[int], splits: int | None, cuda: torch.device
) -> None:
    """Frames of 258 tokens after cached ones, in random pages; one row of the bucket is unused."""
    from mstar_core.engine.attention.kernels.split_kv import PagedDenseAttention

    page, heads, width, most = 258, 4, 64, 40
    generator = torch.Generator(cuda).manual_seed(rows)
    pool = torch.randn(rows * most + 1, 2, page, heads, width, device=cuda, generator=generator).to(torch.bfloat16)
    tables = np.random.default_rng(rows).permutation(rows * most).reshape(rows, most).astype(np.int32)
    shape = AttentionShape(sequences=rows + 1, tokens=page, pages=most, writes=True)
    passes = AttentionBuffers(PagedDenseAttention([pool], page, shape, splits), cuda)
    given = np.array(cached, dtype=np.int64) * page
    passes.prepare(AttentionMetadata.of(np.arange(rows), given, tables, page, causal=False))
    joined = torch.randn((rows + 1) * page, 3 * heads, width, device=cuda, generator=generator).to(torch.bfloat16)
    query, key, value = joined.chunk(3, dim=1)
    found = passes.view.attend(0, query, key, value).view(rows + 1, page, heads, width)
    assert not found[rows].any()
    for row, frames in enumerate(cached):
        pages = torch.from_numpy(tables[row, : frames + 1].astype(np.int64)).to(cuda)
        keys, values = pool[pages].double().transpose(0, 1).flatten(1, 2)
        assert torch.equal(keys[-page:].to(torch.bfloat16), key.view(rows + 1, page, heads, width)[row])
        own = query.view(rows + 1, page, heads, width)[row].double()
        score = torch.einsum("qhw,khw->hqk", own, keys) * width**-0.5
        expected = torch.einsum("hqk,khw->qhw", score.softmax(-1), values)
        assert difference(found[row], expected.cpu(), is_relative=True) < 1e-2, (row, frames)


def test_splits_of_few_tiles_fill_the_device_once() -> None:
    from mstar_core.engine.attention.kernels.split_kv import splits_of

    assert [splits_of(5 * rows, 16) for rows in (1, 2, 3, 100)] == [4, 2, 1, 1]
    assert splits_of(1, 4) == 8


@pytest.mark.parametrize("splits", [None, 1])
@pytest.mark.parametrize(
    ("page", "tokens", "cached"),
    [(16, 40, (0, 33)), (64, 130, (64, 5)), (70, 70, (0, 210)), (128, 66, (100, 128)), (258, 17, (516, 700))],
)
def test_attention_of_passes_in_pages_of_any_size_against_float64(
    page: int, tokens: int, cached: tuple[int, int], splits: int | None, cuda: torch.device
) -> None:
    """Pages smaller than a block, of full blocks, and larger; rows of any length; four heads on two KV heads."""
    from mstar_core.engine.attention.kernels.split_kv import PagedDenseAttention

    heads, width, rows, most = 4, 64, 2, 20
    generator = torch.Generator(cuda).manual_seed(page)
    pool = torch.randn(rows * most + 1, 2, page, 2, width, device=cuda, generator=generator).to(torch.bfloat16)
    tables = np.random.default_rng(page).permutation(rows * most).reshape(rows, most).astype(np.int32)
    shape = AttentionShape(sequences=rows, tokens=tokens, pages=most, writes=True)
    passes = AttentionBuffers(PagedDenseAttention([pool], page, shape, splits), cuda)
    lengths = np.array(cached, dtype=np.int64)
    passes.prepare(AttentionMetadata.of(np.arange(rows), lengths, tables, tokens, causal=False))
    query = torch.randn(rows * tokens, heads, width, device=cuda, generator=generator).to(torch.bfloat16)
    own = torch.randn(2, rows * tokens, 2, width, device=cuda, generator=generator).to(torch.bfloat16)
    found = passes.view.attend(0, query, *own).view(rows, tokens, heads, width)
    for row, held in enumerate(cached):
        pages = torch.from_numpy(tables[row].astype(np.int64)).to(cuda)
        both = pool[pages].transpose(0, 1).flatten(1, 2)[:, : held + tokens]
        assert torch.equal(both[:, held:], own.view(2, rows, tokens, 2, width)[:, row])
        keys, values = both.double().repeat_interleave(2, dim=2)
        score = torch.einsum("qhw,khw->hqk", query.view(rows, tokens, heads, width)[row].double(), keys) * width**-0.5
        expected = torch.einsum("hqk,khw->qhw", score.softmax(-1), values)
        assert difference(found[row], expected.cpu(), is_relative=True) < 1e-2, row


def test_rollouts_of_different_horizons_share_graphs(cuda: torch.device) -> None:
    here = replace(place(cuda), attention="flashinfer")
    rolling = Rolling(WIDE, random_nodes(WIDE, here), here, 12)
    rolling.whole(trial(WIDE, 1, 1, 3))
    rolling.driver.capture()
    before = rolling.counters()["ac_predictor"]
    for horizon in (5, 2, 11):
        rolling.whole(trial(WIDE, 1, 1, horizon))
    after = rolling.counters()["ac_predictor"]
    assert after["graph_hits"] - before["graph_hits"] == 18 and after["graph_misses"] == before["graph_misses"]


def test_nodes_are_warmed_as_a_worker_warms_them(cuda: torch.device) -> None:
    for node in random_nodes(WIDE, place(cuda)).values():
        warm_module(node)
