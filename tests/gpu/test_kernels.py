"""Every kernel of the core at small and odd sizes, for `make sanitize`, which detects accesses out of bounds.

Values are looked at elsewhere, against references; here each result need only be finite and in range.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from mstar_core.engine.attention.backend import backend, make_pools
from mstar_core.engine.attention.static import AttentionBuffers
from mstar_core.engine.cuda_graphs.cache import GraphCache
from mstar_core.engine.cuda_graphs.node import NodeGraphs
from mstar_core.engine.cuda_graphs.ragged import CapturedNode
from mstar_core.engine.device_state.slots import DeviceSlots
from mstar_core.engine.sampling.columns import UploadedColumns
from mstar_core.engine.sampling.logit_subset import LogitSubset
from mstar_core.engine.sampling.masks import masked
from mstar_core.engine.sampling.sampler import Sampler
from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape
from mstar_core.layers.code_predictor import CodePredictor, CodePredictorSpec
from mstar_core.layers.linear import fuse_projections
from mstar_core.layers.lora import AdapterLimits
from tests.engine.tiny_engine import LM, generate, prompt
from tests.gpu.kernels import launched
from tests.gpu.test_engine import SAMPLINGS, WIDE, WideLM, wide_engine
from tests.gpu.test_lora import blocks, projections

pytestmark = pytest.mark.gpu
RAN: set[str] = set()


def draws(cuda: torch.device, rows: int, vocab: int) -> None:
    """The sampler alone."""
    from mstar_core.engine.sampling import top_p

    params = [SAMPLINGS[row % len(SAMPLINGS)] for row in range(rows)]
    uploaded = UploadedColumns.of(params, cuda)
    seen = torch.zeros(rows + 1, vocab, dtype=torch.bool, device=cuda)
    seen[:, ::3] = True
    logits, slots = torch.randn(rows, vocab, device=cuda) * 3, torch.arange(1, rows + 1, device=cuda)
    chance = torch.from_numpy(uploaded.chance(np.arange(rows))).to(cuda)
    ids = top_p.draw(logits, uploaded.columns, chance, slots, seen, None).tolist()
    assert all(0 <= drawn < vocab for drawn in ids), ids


def module_draws(cuda: torch.device, rows: int, vocab: int) -> None:
    """Draw inside a module: greedy, in pairs, and by narrowing keys."""
    from mstar_core.layers.sampling import draw

    row = torch.arange(rows, device=cuda)
    logits, uniform = torch.randn(rows, vocab, device=cuda), torch.rand(rows, device=cuda)
    drawn = draw(logits, uniform, (row % 4).float(), row % 3 * 50, 0.5 + 0.1 * row)
    assert all(0 <= each < vocab for each in drawn.tolist())


def steps(cuda: torch.device, count: int, graphs: tuple[int, ...]) -> None:
    """Run a language model with prompts and outputs of odd lengths: layers, pages, attention, sampling."""
    module = WideLM(vocab=1001).to(cuda, torch.bfloat16)
    fuse_projections(module)
    engine = wide_engine(cuda, module, vocab=1001, graphs=graphs, num_pages=64, token_budget=48)
    rows = [(prompt(seed, 1 + 17 * seed), 5 + seed, SAMPLINGS[seed % len(SAMPLINGS)]) for seed in range(count)]
    for request, ids in zip(rows, generate(rows, lookahead=1, engine=engine), strict=True):
        assert len(ids) == request[1] + 1 and all(0 <= drawn < 1001 for drawn in ids)


def gates(cuda: torch.device, rows: int, width: int) -> None:
    """Run the gated activation of many rows. For few rows it is part of the GEMM."""
    from mstar_core.layers.kernels.elementwise import gated_activation

    out = gated_activation(torch.randn(rows, 2 * width, device=cuda, dtype=torch.bfloat16))
    assert out.shape == (rows, width) and torch.isfinite(out).all()


def sums(cuda: torch.device, rows: int, width: int) -> None:
    """Run a residual sum and its LayerNorm: without a branch, with one, and with partial sums and a bias."""
    from mstar_core.layers.kernels.elementwise import add_layer_norm

    norm = torch.nn.LayerNorm(width, device=cuda, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(2, rows, width, device=cuda).bfloat16()
    for branch, bias in ((None, None), (x, None), (torch.randn(3, 2, rows, width, device=cuda), norm.bias)):
        for made in add_layer_norm(x, branch, norm, bias):
            assert made.shape == x.shape and torch.isfinite(made).all()


def linears(cuda: torch.device, rows: int, outputs: int) -> None:
    """Run GEMMs of few rows with float8 weights: split-K, both gates, and dequantized for the library."""
    from mstar_core.layers.kernels import elementwise, launch, small_m_gemm

    values = torch.randn(2 * outputs, 384, device=cuda).to(torch.float8_e4m3fn)
    scale, x = torch.rand(2 * outputs, device=cuda), torch.randn(rows, 384, device=cuda, dtype=torch.bfloat16)
    overlaps = launch.supports_pdl(cuda)
    for shape in (
        small_m_gemm.GemmTiling(block=64, step=128, stages=3, splits=2),
        small_m_gemm.GemmTiling(block=64, step=128, stages=8, prefetch_bytes=256),
    ):
        for weight, by in ((values, scale), (values.to(torch.bfloat16), None)):
            assert torch.isfinite(small_m_gemm.gemm_partials(x, weight, by, shape, overlaps=overlaps)).all()
            for is_gelu in (False, True):
                out = small_m_gemm.gated_gemm(x, weight, by, shape, overlaps=overlaps, is_gelu=is_gelu)
                assert out.shape == (rows, outputs) and torch.isfinite(out).all()
    assert torch.isfinite(elementwise.dequantize(values, scale, torch.bfloat16)).all()


def rounded_rows(cuda: torch.device, rows: int, width: int) -> None:
    """Round rows to float8, some of one large value among small ones and the first of zeros."""
    from mstar_core.layers import float8
    from mstar_core.layers.kernels.elementwise import round_rows

    x = torch.randn(rows, width, device=cuda).bfloat16()
    x[:, -1] *= 1000
    x[0] = 0
    values, scales = round_rows(x)
    assert values.shape == x.shape and scales.shape == (rows,)
    wide = x.double()
    torch.testing.assert_close(scales[1:].double(), wide[1:].abs().amax(dim=1) / float8.LARGEST, atol=0, rtol=1e-6)
    # The largest value of a row is exact. The others have three bits of mantissa, and 2**-10 scales below the normals.
    assert not values[0].float().any() and scales[0] > 0
    assert (values[1:].float().abs().amax(dim=1) == float8.LARGEST).all()
    error = (values.double() * scales.double()[:, None] - wide).abs()
    assert (error <= torch.maximum(wide.abs() / 15, scales.double()[:, None] * 1.001 * 2.0**-10)).all()


def norms(cuda: torch.device, rows: int, width: int) -> None:
    """Run norms with both roundings, with and without partial sums."""
    from mstar_core.layers.kernels import elementwise

    x, weight = torch.randn(rows, width, device=cuda).bfloat16(), torch.randn(width, device=cuda).bfloat16()
    for is_offset in (False, True):
        assert torch.isfinite(elementwise.rms_norm(x, weight, 1e-6, is_offset=is_offset)).all()
        for branch in (x, torch.randn(3, rows, width, device=cuda)):
            made = elementwise.add_rms_norm(x, branch, weight, 1e-6, is_offset=is_offset)
            assert all(torch.isfinite(each).all() for each in made)


def later(cuda: torch.device, rows: int, tokens: int) -> None:
    """Run whole padded steps in fixed shapes, as warm-up does for steps that are captured later."""
    module, vocab = WideLM(vocab=1001).to(cuda, torch.bfloat16), 1001
    fuse_projections(module)
    assert WIDE.kv is not None
    slots = DeviceSlots(rows + 1, vocab, cuda)
    attention = backend("flashinfer", make_pools(WIDE.kv, 16, 16, torch.bfloat16, cuda), 16)
    cache = GraphCache(cuda)
    sampler = Sampler(WIDE, slots)
    node = CapturedNode(module=module, attention=attention, slots=slots, pages=8, page_size=16, sampler=sampler)
    graphs = NodeGraphs(WIDE, node, cache, id_port="tokens", token_budget=tokens)
    assert graphs.decode is not None
    graphs.decode.plan([rows])
    graphs.passes.plan_ids([tokens], tokens)
    cache.compile_queued()
    assert not slots.stopped[:-1].any() and not slots.seen[:-1].any()


def prompts(cuda: torch.device, counts: tuple[int, ...], cached: tuple[int, ...], bucket: int) -> None:
    """Run attention of packed prompts in fixed shapes, as captured prefill does."""
    from mstar_core.engine.attention.kernels.prefill import PagedPrefillAttention

    page, most, pieces = 16, 16, len(counts)
    tables = np.arange((pieces + 1) * most, dtype=np.int32).reshape(pieces + 1, most)[:, ::-1].copy()
    pool = torch.randn(tables.size, 2, page, 2, 128, device=cuda, dtype=torch.bfloat16)
    shape = AttentionShape(sequences=pieces + 1, tokens=bucket, pages=most, causal=True, is_ragged=True)
    fixed = AttentionBuffers(PagedPrefillAttention([pool], page, shape), cuda)
    rows = np.arange(pieces, dtype=np.int64)
    lengths = np.array(cached, dtype=np.int64)
    fixed.prepare(AttentionMetadata.of(rows, lengths, tables, np.array(counts, dtype=np.int64)))
    query, key, value = (torch.randn(bucket, heads, 128, device=cuda, dtype=torch.bfloat16) for heads in (6, 2, 2))
    out = fixed.view.attend(0, query, key, value)
    assert out.shape == query.shape and torch.isfinite(out).all()


def passes(cuda: torch.device, rows: int, cached: int, page: int, tokens: int = 70) -> None:
    """Run dense attention of passes that append, as captured frames do: one kernel, or two for few rows."""
    from mstar_core.engine.attention.kernels.split_kv import PagedDenseAttention

    most = 8
    tables = np.arange(rows * most, dtype=np.int32).reshape(rows, most)[:, ::-1].copy()
    pool = torch.randn(tables.size + 1, 2, page, 2, 64, device=cuda, dtype=torch.bfloat16)
    shape = AttentionShape(sequences=rows + 1, tokens=tokens, pages=most, writes=True)
    fixed = AttentionBuffers(PagedDenseAttention([pool], page, shape), cuda)
    order = np.arange(rows, dtype=np.int64)
    fixed.prepare(AttentionMetadata.of(order, order + cached, tables, tokens, causal=False))
    query, key, value = torch.randn(3, (rows + 1) * tokens, 2, 64, device=cuda, dtype=torch.bfloat16).unbind()
    out = fixed.view.attend(0, query, key, value)
    assert out.shape == query.shape and torch.isfinite(out).all() and not out[rows * tokens :].any()
    assert torch.equal(fixed.view.attend_placed(0, query), out) and fixed.view.places(0)[0] is pool


def prefix(cuda: torch.device, rows: int, cached: int, page: int = 37) -> None:
    """Run prefix attention, as captured flow steps do: one block of keys per program for few rows.

    On Hopper many rows of pages of whole blocks are taken by the kernel that folds queries.
    """
    from mstar_core.engine.attention.kernels.prefix import PagedPrefixAttention

    most, tokens = 8, 7
    tables = np.arange(rows * most, dtype=np.int32).reshape(rows, most)[:, ::-1].copy()
    pool = torch.randn(tables.size + 1, 2, page, 2, 64, device=cuda, dtype=torch.bfloat16)
    shape = AttentionShape(sequences=rows + 1, tokens=tokens, pages=most, writes=False)
    fixed = AttentionBuffers(PagedPrefixAttention([pool], page, shape), cuda)
    order = np.arange(rows, dtype=np.int64)
    fixed.prepare(AttentionMetadata.of(order, order + cached, tables, tokens, causal=False, writes=False))
    query, key, value = torch.randn(3, (rows + 1) * tokens, 2, 64, device=cuda, dtype=torch.bfloat16).unbind()
    out = fixed.view.attend(0, query, key, value)
    assert out.shape == query.shape and torch.isfinite(out).all()


def packed(cuda: torch.device, counts: tuple[int, ...], bucket: int) -> None:
    """Run packed prefill attention in fixed shapes, with and without its own rotation."""
    from mstar_core.engine.attention.kernels.prefill import PackedPrefillAttention

    page, most, pieces = 16, 16, len(counts)
    tables = np.arange((pieces + 1) * most, dtype=np.int32).reshape(pieces + 1, most)[:, ::-1].copy()
    pool = torch.randn(tables.size, 2, page, 2, 128, device=cuda, dtype=torch.bfloat16)
    shape = AttentionShape(sequences=pieces + 1, tokens=bucket, pages=most, is_ragged=True, is_fresh=True)
    fixed, none = AttentionBuffers(PackedPrefillAttention([pool], page, shape), cuda), np.zeros(pieces, dtype=np.int64)
    tokens = np.array(counts, dtype=np.int64)
    fixed.prepare(AttentionMetadata.of(np.arange(pieces, dtype=np.int64), none, tables, tokens, causal=False))
    view, turn = fixed.view, torch.randn(2, bucket, 1, 128, device=cuda).unbind()
    query, key, value = (torch.randn(bucket, heads, 128, device=cuda, dtype=torch.bfloat16) for heads in (6, 2, 2))
    together = view.attend_packed(0, torch.cat([query, key, value], dim=1).flatten(1), (turn[0], turn[1]), 6)
    for out in (view.attend(0, query, key, value), together):
        assert out is not None and out.shape == query.shape and torch.isfinite(out).all()
        assert not out[sum(counts) :].any()


def gathers(cuda: torch.device, cached: int, tokens: int) -> None:
    """Gather the cached and the new keys and values of one sequence, as passes of one sequence do."""
    from mstar_core.engine.attention.kernels.page_copies import gather

    page, heads, width = 5, 3, 20
    pool = torch.randn(7, 2, page, heads, width, device=cuda, dtype=torch.bfloat16)
    pages = torch.tensor([6, 0, 3, 2], dtype=torch.int32, device=cuda)
    key, value = torch.randn(2, tokens, heads, width, device=cuda, dtype=torch.bfloat16).unbind()
    old = pool[pages.long()].transpose(0, 1).flatten(1, 2)[:, :cached]
    assert torch.equal(gather(pool, page, pages, cached, key, value), torch.cat([old, torch.stack([key, value])], 1))


def fixed_rows(cuda: torch.device, rows: int, cached: int) -> None:
    """Run a decode step in fixed shapes, as it is captured, without a CUDA graph."""
    module, page, most = WideLM(vocab=1001).to(cuda, torch.bfloat16), 16, 16
    fuse_projections(module)
    assert WIDE.kv is not None
    pools = make_pools(WIDE.kv, rows * most, page, torch.bfloat16, cuda)
    shape = AttentionShape(sequences=rows, tokens=1, pages=most, causal=True)
    fixed = AttentionBuffers(backend("flashinfer", pools, page).static(shape), cuda)
    tables = np.arange(rows * most, dtype=np.int32).reshape(rows, most)
    fixed.prepare(AttentionMetadata.of(np.arange(rows), np.arange(rows) + cached, tables))
    positions, tokens = torch.arange(rows, device=cuda) + cached, torch.arange(rows, device=cuda)
    hidden = module(kv=fixed.view, positions=positions, tokens=tokens)["hidden"]
    assert hidden.shape == (rows, 512) and torch.isfinite(module.head(hidden)).all()


def experts(cuda: torch.device, tokens: int, shared: int) -> None:
    """Run a mixture of experts of widths that no tile divides."""
    from mstar_core.layers import MoESpec, SparseMoE

    spec = MoESpec(width=40, inner=24, experts=5, experts_per_token=2, shared_inner=shared)
    with cuda:
        moe = SparseMoE(spec).requires_grad_(False)
        for parameter in moe.parameters():
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    moe = moe.bfloat16()
    moe.fuse_projections()
    assert moe(torch.randn(tokens, spec.width, device=cuda, dtype=torch.bfloat16)).isfinite().all()


def masks(cuda: torch.device, rows: int, vocab: int) -> None:
    """Mask the logits of every second sequence."""
    words = torch.randint(-(2**31), 2**31 - 1, (rows, -(-vocab // 32)), dtype=torch.int32, device=cuda)
    places = torch.arange(rows, dtype=torch.int32, device=cuda)
    places[1::2] = -1
    logits = masked(torch.randn(rows, vocab, device=cuda), words, places, LogitSubset(LM, vocab, cuda))
    assert not logits[1::2].isinf().any() and not logits.isnan().any()


def adapters(cuda: torch.device, tokens: int) -> None:
    """Add the products of three adapters to outputs of tokens, some of which have none."""
    made = projections("o", AdapterLimits(count=3, rank=16), torch.bfloat16, cuda)
    x = torch.randn(tokens, 4096, device=cuda, dtype=torch.bfloat16)
    out = torch.zeros(tokens, 4096, device=cuda, dtype=torch.bfloat16)
    with made.bank.applied(blocks(torch.arange(tokens) % 4 - 1, cuda)):
        made.add(x, out)
    assert out.isfinite().all()


def residual_codes(cuda: torch.device, rows: int, groups: int, heads: int, head_dim: int, given: int | None) -> None:
    """Frames of a code predictor. given: width of its inputs."""
    sizes = CodePredictorSpec(
        vocab=100,
        width=128,
        layers=2,
        heads=heads,
        kv_heads=2,
        head_dim=head_dim,
        mlp=256,
        groups=groups,
        input_width=given,
    )
    predictor = CodePredictor(sizes).requires_grad_(False)
    rotation = predictor.model.rotation
    predictor = predictor.to(cuda, torch.bfloat16)
    predictor.model.rotation = rotation.to(cuda)
    fuse_projections(predictor)
    states, first = torch.randn(2, rows, given or 128, device=cuda, dtype=torch.bfloat16).unbind()
    rule = (torch.ones(rows), torch.arange(rows), torch.full((rows,), 0.8))
    uniform = torch.rand(rows, groups - 1, device=cuda)
    codes = predictor.predict(states, first, uniform, *(each.to(cuda) for each in rule))
    assert codes.shape == (rows, groups - 1) and all(0 <= code < 100 for code in codes.flatten().tolist())


def sounds(cuda: torch.device, rows: int, steps: int) -> None:
    """A convolution with SnakeBeta, and the last one of a decoder of sound."""
    from mstar_core.layers.snake_conv import FusedConv, FusedOutput, SnakeBeta, convolve, samples_of

    x = torch.randn(rows, steps, 33, device=cuda)
    conv, last = torch.nn.Conv1d(33, 24, 7, dilation=3).to(cuda), torch.nn.Conv1d(24, 1, 7).to(cuda)
    _, bent = convolve(FusedConv.causal(conv, SnakeBeta(24).to(cuda), torch.float32), x)
    assert samples_of(FusedOutput.of(last), bent, is_pcm=False).abs().max() <= 1


CASES: dict[str, Callable[[torch.device], None]] = {
    "draws-1": lambda cuda: draws(cuda, 1, 53),
    "draws-3": lambda cuda: draws(cuda, 3, 4099),
    "draws-17": lambda cuda: draws(cuda, 17, 1000),
    "module-draws": lambda cuda: module_draws(cuda, 12, 1001),
    "masks": lambda cuda: masks(cuda, 3, 1001),
    "adapters": lambda cuda: adapters(cuda, 37),
    "gates": lambda cuda: gates(cuda, 37, 1001),
    "linears": lambda cuda: linears(cuda, 3, 33),
    "sums": lambda cuda: sums(cuda, 3, 36),
    "sums-wide": lambda cuda: sums(cuda, 7, 1408),
    "norms": lambda cuda: norms(cuda, 3, 100),
    "rounded-rows": lambda cuda: rounded_rows(cuda, 5, 37),
    "rounded-rows-wide": lambda cuda: rounded_rows(cuda, 3, 4101),
    "later": lambda cuda: later(cuda, 5, 48),
    "prompts-short": lambda cuda: prompts(cuda, (1, 33, 7), (0, 5, 200), 64),
    "prompts-long": lambda cuda: prompts(cuda, (129, 65), (17, 0), 300),
    "packed-one": lambda cuda: packed(cuda, (33,), 48),
    "packed-many": lambda cuda: packed(cuda, (130, 1, 64), 300),
    "passes-few": lambda cuda: passes(cuda, 2, 0, 37),
    "passes-many": lambda cuda: passes(cuda, 150, 75, 70),
    "prefix-few": lambda cuda: prefix(cuda, 2, 0),
    "prefix-some": lambda cuda: prefix(cuda, 30, 150),
    "prefix-many": lambda cuda: prefix(cuda, 70, 150),
    "prefix-gqa-packed": lambda cuda: prefix(cuda, 30, 150, page=64),
    "gathers-none": lambda cuda: gathers(cuda, 0, 9),
    "gathers-some": lambda cuda: gathers(cuda, 17, 3),
    "rows-1": lambda cuda: fixed_rows(cuda, 1, 0),
    "rows-5": lambda cuda: fixed_rows(cuda, 5, 130),
    "rows-19": lambda cuda: fixed_rows(cuda, 19, 15),
    "experts-few": lambda cuda: experts(cuda, 3, 0),
    "experts-many": lambda cuda: experts(cuda, 130, 40),
    "frames": lambda cuda: residual_codes(cuda, 1, 16, 4, 128, None),
    "frames-odd": lambda cuda: residual_codes(cuda, 3, 5, 6, 64, 192),
    "frames-many": lambda cuda: residual_codes(cuda, 40, 7, 2, 32, None),
    "steps": lambda cuda: steps(cuda, 5, ()),
    "sounds": lambda cuda: sounds(cuda, 3, 37),
}


def run(name: str, cuda: torch.device) -> None:
    with torch.inference_mode():
        CASES[name](cuda)
        torch.cuda.synchronize()
    RAN.add(name)


@pytest.mark.parametrize("name", CASES)
def test_kernels(name: str, cuda: torch.device) -> None:
    run(name, cuda)


def test_kernels_when_captured(cuda: torch.device) -> None:
    """Run separately: torch can allocate during capture only with its pooling allocator, which hides tensor bounds."""
    with torch.inference_mode():
        steps(cuda, 5, (1, 8))


def test_kernels_are_all_run_here(cuda: torch.device) -> None:
    """The cases must launch every kernel, because `make sanitize` checks only what runs here."""
    for name in CASES.keys() - RAN:
        run(name, cuda)
    found = launched("mstar_core.engine", "mstar_core.layers")
    assert found and all(found.values()), {name for name, has_run in found.items() if not has_run}
