"""Every kernel of V-JEPA 2 once, at small and odd sizes, for `make sanitize`."""

from __future__ import annotations

import importlib
from types import ModuleType

import numpy as np
import pytest
import torch

from mstar_core.engine.attention.static import AttentionBuffers
from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape
from mstar_vjepa2.nodes.poses import moved
from mstar_vjepa2.nodes.rotary import Rotary3D
from tests.gpu.kernels import launched

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("head_dim", [64, 12, 26])
def test_kernels_of_angles(head_dim: int) -> None:
    cosine, sine = Rotary3D(head_dim).to("cuda").of_ids(torch.arange(37, device="cuda"), 4, 4)
    assert cosine.shape == sine.shape == (37, 1, head_dim) and (cosine**2 + sine**2 - 1).abs().max() < 1e-5
    rest = 6 * (head_dim // 3 // 2)
    assert (cosine[..., rest:] == 1).all() and not sine[..., rest:].any()


@pytest.mark.parametrize(("heads", "head_dim", "rows"), [(16, 64, 258), (3, 12, 7), (9, 26, 1)])
def test_kernels_of_rotation(heads: int, head_dim: int, rows: int) -> None:
    """In place, with append to the cache, and in the epilogue of the projection."""
    from mstar_vjepa2.kernels import gemm, rotary

    rotation = Rotary3D(head_dim).to("cuda").of_ids(torch.arange(rows, device="cuda"), 4, 4)
    x, page = torch.randn(2, rows, 3 * heads, head_dim, device="cuda").bfloat16(), 11
    assert rotary.rotate(x[:, :, : 2 * heads], *rotation).isfinite().all()
    pool = torch.zeros(rows // page + 1, 2, page, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    at = torch.arange(rows, device="cuda")
    places = at // page * 2 * page + at % page
    places[-1] = -1
    assert rotary.rotate_append(pool, places, x[0].flatten(1), rotation, heads).isfinite().all()
    weight = torch.randn(3 * heads * head_dim, 512, device="cuda").bfloat16()
    if gemm.supports(weight) and gemm.can_rotate(weight, pool, head_dim):
        inputs = torch.randn(rows, 512, device="cuda").bfloat16()
        query = gemm.qkv_rotary(inputs, weight, weight[:, 0].contiguous(), rotation, pool, places)
        assert query.shape == (rows, heads, head_dim) and query.isfinite().all() and pool.isfinite().all()


@pytest.mark.parametrize("rows", [3, 258])
def test_kernels_of_products(rows: int) -> None:
    from mstar_vjepa2.kernels import gemm

    x, weight = torch.randn(rows, 512, device="cuda").bfloat16(), torch.randn(256, 512, device="cuda").bfloat16()
    assert gemm.supports(weight)
    for actual in (gemm.linear(x, weight, weight[:, 0].contiguous()), gemm.split_k(x, weight).sum(0)):
        assert actual.shape == (rows, 256) and actual.isfinite().all()
    assert gemm.linear(x, weight, weight[:, 0].contiguous(), is_gelu=True).isfinite().all()


@pytest.mark.parametrize("rows", [202, 256, 258, 263, 272])
@pytest.mark.parametrize(("outputs", "inputs"), [(336, 256), (1024, 1088), (4112, 256)])
def test_kernels_of_clusters(rows: int, outputs: int, inputs: int) -> None:
    """Sizes with partial last tiles and slices, and both tilings; bits are reproducible."""
    cluster = _clusters()
    dtype = torch.bfloat16 if rows != 263 else torch.float16
    x, weight = (
        torch.randn(rows, inputs, device="cuda").to(dtype),
        torch.randn(outputs, inputs, device="cuda").to(dtype),
    )
    bias = torch.randn(outputs, device="cuda").to(dtype)
    assert cluster.supports(x, weight) and not cluster.supports(x[: rows // 2], weight)
    assert cluster.config_of(weight, cluster.LINEAR) == (cluster.WIDER if outputs > 4000 else cluster.NARROW)
    assert (cluster.config_of(weight, cluster.SPLIT_K) == cluster.RESIDENT) == (outputs == 336)
    expected = x.double() @ weight.double().T
    actual = {
        "whole": (cluster.linear(x, weight, bias), expected + bias.double()),
        "gelu": (cluster.linear(x, weight, bias, is_gelu=True), torch.nn.functional.gelu(expected + bias.double())),
        "parts": (cluster.split_k(x, weight).sum(0), expected),
    }
    for name, (found, reference) in actual.items():
        error = (found.double() - reference).norm() / reference.norm()
        assert error < (1e-5 if name == "parts" else 4e-3), (name, float(error))
    assert torch.equal(cluster.split_k(x, weight), cluster.split_k(x, weight))


@pytest.mark.parametrize("rows", [256, 258, 259])
def test_kernels_of_clusters_that_turn(rows: int) -> None:
    """Queries, keys and values equal those of the Triton kernel; one sequence has no slot."""
    from mstar_vjepa2.kernels import gemm

    cluster, heads, page = _clusters(), 4, 259
    rotation = Rotary3D(64).to("cuda").of_ids(torch.arange(rows, device="cuda"), 16, 16)
    x, weight = (torch.randn(lines, 512, device="cuda").bfloat16() for lines in (rows, 3 * heads * 64))
    bias, places = weight[:, 0].contiguous(), 2 * page + torch.arange(rows, device="cuda")
    places[-1] = -1
    pools = [torch.zeros(3, 2, page, heads, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    assert cluster.supports(x, weight) and cluster.can_rotate(weight, pools[0], 64)
    queries = [
        kernels.qkv_rotary(x, weight, bias, rotation, pool, places)
        for kernels, pool in zip((cluster, gemm), pools, strict=True)
    ]
    for one, other in (queries, pools):
        assert (one.float() - other.float()).norm() < 4e-3 * other.float().norm()
    assert not pools[0][1, :, rows - 1 :].any() and pools[0][1, :, : rows - 1].any(-1).all()


@pytest.mark.parametrize(("rows", "cached"), [(1, 300), (2, 0), (3, 130)])
def test_kernels_of_frames(rows: int, cached: int) -> None:
    """Few frames on Hopper: the kernel equals the one that the engine has for all devices."""
    from mstar_core.engine.attention.kernels.split_kv import PagedDenseAttention

    dense, tokens, heads, pages = _hopper("dense"), 130, 2, 4
    device = torch.device("cuda")
    pool = torch.randn(rows * pages + 1, 2, tokens, heads, 64, device=device).bfloat16()
    tables = np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)[:, ::-1].copy()
    shape = AttentionShape(sequences=rows + 1, tokens=tokens, pages=pages)
    passes = AttentionBuffers(PagedDenseAttention([pool], tokens, shape), device)
    order = np.arange(rows, dtype=np.int64)
    passes.prepare(AttentionMetadata.of(order, order + cached, tables, tokens, causal=False))
    query, key, value = torch.randn(3, (rows + 1) * tokens, heads, 64, device=device).bfloat16()
    expected = passes.view.attend(0, query, key, value)
    assert dense.supports(query, pool, tokens)
    out = passes.view.attend_placed(0, query, kernel=dense)
    assert (out.float() - expected.float()).norm() < 1e-2 * expected.float().norm() and not out[rows * tokens :].any()


def _clusters() -> ModuleType:
    return _hopper("multicast_gemm")


def _hopper(name: str) -> ModuleType:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("runs on Hopper, for which these kernels are written")
    return importlib.import_module(f"mstar_vjepa2.kernels.{name}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("rows", "conditions", "inner", "width", "head_dim"), [(1, 2, 1408, 1024, 64), (3, 3, 36, 140, 12)]
)
def test_kernels_of_beginnings(
    rows: int, conditions: int, inner: int, width: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Conditions, frame, angles and next poses equal plain operations, also at the poles."""
    from mstar_vjepa2.kernels import embed_head

    side, tokens = 4, 16 + conditions
    latents, poses = torch.randn(rows, side * side, inner, device="cuda"), torch.randn(2, rows, 3, 7, device="cuda")
    poses[1, 0, 0, 3:6] = torch.tensor([0.3, torch.pi / 2, 0.2])
    poses[0, 0, 1, 3:6] = 0.0
    layers = [torch.nn.Linear(count, width, device="cuda").requires_grad_(False) for count in (7, 7, 6)[:conditions]]
    inputs = [poses[0, :, 1], poses[1, :, 0], torch.randn(rows, 6, device="cuda")][:conditions]
    ids = torch.cat([torch.zeros(conditions, dtype=torch.int64), torch.arange(side * side)]).cuda()
    places, rotary = (ids // side, ids % side), Rotary3D(head_dim).to("cuda")
    time = torch.arange(5, 5 + rows, device="cuda").repeat_interleave(tokens)
    begun = embed_head.embed_frame(latents, list(zip(layers, inputs, strict=True)), time, places, rotary, dtype)
    for number, (layer, value) in enumerate(zip(layers, inputs, strict=True)):
        assert (begun.x[:, number].float() - layer(value)).abs().max() < (1e-5 if dtype == torch.float32 else 3e-2)
    assert torch.equal(begun.given, latents.to(dtype))
    expected = rotary(time, *(place.repeat(rows) for place in places))
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(begun.rotation, expected, strict=True))
    assert (begun.next_state - moved(inputs[1], inputs[0])).abs().max() < 1e-5


@pytest.mark.parametrize(("slices", "skip"), [(1, 0), (2, 2), (4, 0)])
def test_kernels_of_latents(slices: int, skip: int) -> None:
    from mstar_vjepa2.kernels import embed_head
    from mstar_vjepa2.nodes.encoder import LATENT_EPS, latents_of

    hidden, expected = torch.randn(slices, 3, 7, 1408, device="cuda"), torch.tensor([1, 0, 1], device="cuda")
    bias = torch.randn(1408, device="cuda").bfloat16() if skip else None
    actual = embed_head.latents(hidden, bias, expected[:, None].expand(-1, 2)[:, 0], LATENT_EPS, skip)
    whole = hidden.sum(0) if bias is None else hidden.sum(0) + bias.float()
    assert (actual.cpu() - latents_of(whole[:, skip:].cpu(), expected.bool().cpu())).abs().max() < 1e-4
    plain = latents_of(hidden[0].bfloat16(), expected.bool())
    assert (plain.cpu() - latents_of(hidden[0].bfloat16().cpu(), expected.bool().cpu())).abs().max() < 1e-4


def test_kernels_are_all_run_here() -> None:
    """Every kernel must run in this module, so that the sanitizer checks it."""
    test_kernels_of_angles(12)
    test_kernels_of_latents(2, 2)
    test_kernels_of_beginnings(3, 3, 36, 140, 12, torch.bfloat16)
    test_kernels_of_rotation(16, 64, 258)
    test_kernels_of_products(3)
    test_kernels_of_frames(1, 300)
    torch.cuda.synchronize()
    actual = launched("mstar_vjepa2")
    assert actual and all(actual.values()), {name for name, has_run in actual.items() if not has_run}
