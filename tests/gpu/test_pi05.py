"""Pi0.5 on CUDA against its references and against itself: float32 and bfloat16, plainly and by graphs."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.families.policy import Acting, Place, observation, random_modules
from mstar_core.engine.attention.pytorch import TorchAttention
from mstar_core.engine.attention.static import AttentionBuffers
from mstar_core.engine.cuda_graphs.cache import GraphCache
from mstar_core.engine.device import prepare_device
from mstar_core.engine.module import NodeModule
from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape
from mstar_core.engine.warmup import run_warmup
from mstar_core.layers.rotary import rotate
from mstar_pi05.checkpoint.config import Sizes, Tower, Vision
from mstar_pi05.nodes.expert import AdaNorm, Modulation
from mstar_pi05.nodes.flow import TimeTable, distinct_times
from mstar_pi05.nodes.policy import Policy
from tests.engine.golden_engines import BFLOAT16, FLOAT32, check_policy, difference, policy

pytestmark = pytest.mark.gpu

WIDE = Sizes(
    vocab=1000,
    vision=Vision(width=256, layers=3, heads=4, mlp=512, image_size=224, patch_size=14),
    language=Tower(width=512, layers=4, mlp=1024, heads=8, kv_heads=1, head_dim=256),
    expert=Tower(width=256, layers=4, mlp=512, heads=8, kv_heads=1, head_dim=256),
)
"""The released head size, places of a camera and horizon, in few and narrow blocks."""


def place(cuda: torch.device, dtype: torch.dtype = torch.bfloat16, **changes: object) -> Place:
    prepare_device(cuda)
    vision = "bfloat16" if dtype == torch.bfloat16 else "float32"
    made = Place(device=cuda, dtype=dtype, vision=vision, max_tokens=1024, requests=16)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_float32_equals_the_reference(cuda: torch.device, tmp_path: Path) -> None:
    acting = policy(place(cuda, torch.float32, max_tokens=128), tmp_path)
    check_policy(acting, FLOAT32)
    assert acting.counters()["LLM"]["graph_hits"] >= 3


@pytest.mark.parametrize("vision", ["bfloat16", "tf32", "float32"])
def test_bfloat16_is_near_the_reference(vision: str, cuda: torch.device, tmp_path: Path) -> None:
    """The golden head size, 16, is none that FlashInfer has: torch attends."""
    check_policy(policy(place(cuda, max_tokens=128, vision=vision), tmp_path), BFLOAT16)


@pytest.mark.parametrize("attention", ["torch", "flashinfer"])
def test_captured_equals_plain(attention: str, cuda: torch.device) -> None:
    """In bfloat16 at the released head size: what differs is the order of sums."""
    here = place(cuda, attention=attention)
    modules = random_modules(WIDE, here)
    plain = Acting(WIDE, modules, replace(here, is_captured=False))
    captured = Acting(WIDE, modules, here)
    for group in ([3], [1, 2, 3], [3] * 9):
        seen = [observation(WIDE, cameras, 40 + 7 * n, seed=n) for n, cameras in enumerate(group)]
        expected = plain.act(*seen)
        captured.act(*seen)
        captured.driver.capture()
        before = captured.counters()["LLM"]["graph_hits"]
        for found, wanted in zip(captured.act(*seen), expected, strict=True):
            assert difference(found, wanted, is_relative=True) < BFLOAT16.actions
        assert captured.counters()["LLM"]["graph_hits"] > before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "half"])
@pytest.mark.parametrize(("rows", "given", "tokens"), [(1, 1, 50), (2, 1, 15), (4, 3, 50), (16, 16, 50)])
def test_reading_a_cached_prefix_in_one_kernel_equals_the_torch_form(
    rows: int, given: int, tokens: int, dtype: torch.dtype, cuda: torch.device
) -> None:
    """One graph serves two sets of sequences in turn; unused slots contain NaN."""
    from mstar_core.engine.attention.kernels.prefix import PagedPrefixAttention

    page, pages, held = 16, 64, torch.Generator().manual_seed(3)
    tables = torch.randperm(given * pages, generator=held).view(given, pages).to(torch.int32).numpy()
    pool = torch.full((given * pages + 1, 2, page, 1, 256), float("nan"), dtype=dtype, device=cuda)
    lengths = np.array([(0, 1, 828, 1024, 777)[n % 5] if n else 828 for n in range(given)], dtype=np.int64)
    for row, length in enumerate(lengths):
        for number in range(-(-int(length) // page)):
            used = min(page, int(length) - number * page)
            pool[tables[row, number], :, :used] = torch.randn(2, used, 1, 256, device=cuda).to(dtype)
    shape = AttentionShape(sequences=rows, tokens=tokens, pages=pages, writes=False)
    clean = [pool.nan_to_num(0.0)]
    kernel = AttentionBuffers(PagedPrefixAttention([pool], page, shape), cuda)
    plain = AttentionBuffers(TorchAttention(clean, page).static(shape), cuda)
    query = torch.randn(rows * tokens, 8, 256, device=cuda).to(dtype)
    packed = torch.randn(rows * tokens, 10 * 256, device=cuda).to(dtype)
    key, value = torch.randn(rows * tokens, 1, 256, device=cuda).to(dtype), packed[:, -256:].view(-1, 1, 256)
    with torch.inference_mode():
        kernel.prepare(AttentionMetadata.empty(tables))
        graph, out = GraphCache(cuda).capture(lambda: kernel.view.attend(0, query, key, value))
        assert out is not None
        for order in (np.arange(given), np.arange(given)[::-1].copy()):
            for form in (kernel, plain):
                passes = AttentionMetadata.of(order, lengths[order], tables, tokens, causal=False, writes=False)
                form.prepare(passes)
            graph.replay()
            plain.reset()
            expected = plain.view.attend(0, query, key, value)
            own = slice(0, given * tokens)
            assert difference(out[own], expected[own].cpu(), is_relative=True) < 5e-3
            assert out.isfinite().all(), "spare rows see their own tokens"
            first = out.clone()
            graph.replay()
            assert torch.equal(first, out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "half"])
@pytest.mark.parametrize(
    ("counts", "tokens"),
    [((828,), 832), ((276, 828, 1), 1152), ((64, 65), 192), ((1, 127, 128, 896), 1152), ((1024,), 1024)],
)
def test_a_packed_prefix_in_two_kernels_equals_the_torch_form(
    counts: tuple[int, ...], tokens: int, dtype: torch.dtype, cuda: torch.device
) -> None:
    """Rotation, append and attention; foreign pages contain NaN before and after."""
    from mstar_core.engine.attention.kernels.prefill import PackedPrefillAttention

    page, rows, heads = 16, len(counts), 8
    tables = torch.randperm(rows * 64, generator=torch.Generator().manual_seed(5)).view(rows, 64).int().numpy()
    order, none = np.arange(rows)[::-1].copy(), np.zeros(rows, dtype=np.int64)
    given = AttentionMetadata.of(order, none, tables, np.array(counts), causal=False)
    packed = torch.randn(tokens, (heads + 2) * 256, device=cuda).to(dtype)
    angle = torch.randn(tokens, 1, 128, device=cuda).repeat(1, 1, 2)
    rotation = angle.cos(), angle.sin()
    pools = [torch.full((rows * 64 + 1, 2, page, 1, 256), float("nan"), dtype=dtype, device=cuda) for _ in range(2)]
    shape = AttentionShape(sequences=rows, tokens=tokens, pages=0, is_ragged=True, is_fresh=True)
    fixed = AttentionBuffers(PackedPrefillAttention([pools[0]], page, shape), cuda)
    plain = AttentionBuffers(TorchAttention([pools[1]], page).static(shape), cuda)
    for form in (fixed, plain):
        form.prepare(given)
    out = fixed.view.attend_packed(0, packed, rotation, heads)
    query, key, value = packed.view(tokens, -1, 256).split([heads, 1, 1], dim=1)
    query, key = (rotate(each.float(), *rotation).to(dtype) for each in (query, key))
    expected = plain.view.attend(0, query, key, value)
    used, places = (
        sum(counts),
        given.places(page, sum(counts), 0),
    )
    assert out is not None and out.isfinite().all() and not out[used:].any()
    assert difference(out[:used], expected[:used].cpu(), is_relative=True) < 5e-3
    for offset in (0, page):
        found, wanted = (pool.view(-1, 256)[torch.from_numpy(places + offset).to(cuda)] for pool in pools)
        assert difference(found, wanted.cpu(), is_relative=True) < 5e-3
    assert (~pools[0].isnan()).sum() == 2 * used * 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_towers_sum_and_norm_in_one_kernel_equal_plain_operations(dtype: torch.dtype, cuda: torch.device) -> None:
    from mstar_core.layers.kernels.elementwise import add_layer_norm

    norm = torch.nn.LayerNorm(1152, device=cuda, dtype=dtype).requires_grad_(False)
    norm.weight.normal_()
    norm.bias.normal_()
    x, branch = torch.randn(2, 3, 256, 1152, device=cuda).to(dtype).unbind()
    total, normed = add_layer_norm(x, branch, norm)
    assert torch.equal(total, x + branch)
    limit = 1e-6 if dtype == torch.float32 else 3e-3
    assert difference(normed, norm(x + branch).cpu(), is_relative=True) < limit


@pytest.mark.parametrize(("images", "tokens", "heads", "head_dim"), [(3, 256, 16, 72), (2, 100, 2, 64), (1, 16, 2, 20)])
def test_attention_of_patches_in_float32_is_as_exact_as_torchs(
    images: int, tokens: int, heads: int, head_dim: int, cuda: torch.device
) -> None:
    from mstar_pi05.kernels.vision_attention import attention

    packed = torch.randn(images, tokens, 3 * heads * head_dim, device=cuda)
    split = [each.unflatten(-1, (heads, -1)).transpose(1, 2).double() for each in packed.chunk(3, dim=-1)]
    expected = torch.nn.functional.scaled_dot_product_attention(*split).transpose(1, 2).flatten(-2)
    assert difference(attention(packed, heads), expected.cpu(), is_relative=True) < 2e-6


def test_the_first_request_of_an_expected_kind_is_replayed(cuda: torch.device) -> None:
    here = place(cuda)
    acting = Acting(WIDE, random_modules(WIDE, here), here)
    policy = acting.modules["LLM"]
    assert isinstance(policy, Policy)
    policy.expected_steps = (10,)
    for name, runner in acting.driver.runners.items():
        module = acting.modules[name]
        assert isinstance(module, NodeModule)
        run_warmup(runner, module.warmup_requests(), lambda what: None)
    before = acting.counters()
    acting.act(observation(WIDE, 3, 50))
    after = acting.counters()
    for name, replays in (("vit_encoder", 1), ("LLM", 2)):  # the prefix, and its flow
        assert after[name]["graph_hits"] == before[name]["graph_hits"] + replays, name
        assert after[name]["graph_misses"] == before[name]["graph_misses"], name


@pytest.mark.parametrize("attention", ["torch", "flashinfer"])
def test_prefixes_that_wait_behind_a_busy_device_keep_their_plans(attention: str, cuda: torch.device) -> None:
    """The host is long done with the second one's plan when the device reads that of the first."""
    here = place(cuda, attention=attention)
    acting = Acting(WIDE, random_modules(WIDE, here), here)
    seen = [observation(WIDE, cameras, 30 + cameras, seed=cameras) for cameras in (3, 1, 2)]
    expected = [acting.act(each)[0] for each in seen]
    runner, handles = acting.driver.runners["LLM"], []
    busy = torch.randn(8192, 8192, device=cuda)
    for _ in range(20):
        busy = busy @ busy / 100
    for each in seen:
        handles.append(acting.submit(each, is_flowing=False))
        acting.driver.once("vit_encoder")
        running = runner.launch()
        assert running is not None and runner.is_done(running), "the host must not wait for a prefix"
        acting.driver.take(runner.collect(running))
    for handle, each in zip(handles, seen, strict=True):
        acting.flow(handle, each)
    acting.driver.run()
    done = acting.driver.done
    found = [done[acting._flows[int(handle)]].outputs["robot_actions"].cpu() for handle in handles]
    for first, second in zip(found, expected, strict=True):
        assert difference(first, second, is_relative=True) < BFLOAT16.actions
    acting.end()


def test_flows_that_wait_behind_a_busy_device_keep_their_inputs(cuda: torch.device) -> None:
    """The next flow's noise is laid for its copy while the device has not read that of the first."""
    here = place(cuda)
    acting = Acting(WIDE, random_modules(WIDE, here), here)
    seen = [observation(WIDE, 3, 50, seed=seed) for seed in (1, 2)]
    acting.act(seen[0])
    acting.driver.capture()
    expected = [acting.act(each)[0] for each in seen]
    handles = [acting.submit(each, is_flowing=False) for each in seen]
    acting.driver.run()
    runner, flying = acting.driver.runners["LLM"], []
    hits = acting.counters()["LLM"]["graph_hits"]
    busy = torch.randn(8192, 8192, device=cuda)
    for _ in range(20):
        busy = busy @ busy / 100
    for handle, each in zip(handles, seen, strict=True):
        acting.flow(handle, each)
        flying.append(runner.launch())
    for running in flying:
        assert running is not None
        acting.driver.take(runner.collect(running))
    assert acting.counters()["LLM"]["graph_hits"] == hits + 2
    done = acting.driver.done
    for handle, wanted in zip(handles, expected, strict=True):
        found = done[acting._flows[int(handle)]].outputs["robot_actions"]
        assert difference(found, wanted, is_relative=True) < BFLOAT16.actions
    acting.end()


def test_a_step_is_done_when_its_actions_are_on_the_host(cuda: torch.device) -> None:
    """The worker asks and does not wait: what is launched behind a flow must not hold its actions back."""
    here = place(cuda)
    acting = Acting(WIDE, random_modules(WIDE, here), here)
    seen = observation(WIDE, 3, 50)
    acting.act(seen)
    acting.driver.capture()
    handle = acting.submit(seen, is_flowing=False)
    acting.driver.run()
    acting.flow(handle, seen)
    runner = acting.driver.runners["LLM"]
    running = runner.launch()
    assert running is not None
    busy = torch.randn(8192, 8192, device=cuda)
    for _ in range(20):
        busy = busy @ busy / 100
    end = torch.cuda.Event()
    end.record()
    while not runner.is_done(running):
        pass
    (done,) = runner.collect(running).done
    assert not end.query(), "the products behind it are still running"
    assert done.outputs["robot_actions"].device.type == "cpu" and done.outputs["robot_actions"].isfinite().all()
    acting.end()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_fused_steps_equal_the_plain_ones_of_the_cpu(dtype: torch.dtype, cuda: torch.device) -> None:
    """One request takes the products for few rows, two take the library's; each by graphs as well."""
    here = place(cuda, dtype)
    plain = replace(here, device=torch.device("cpu"), is_captured=False)
    modules = random_modules(WIDE, plain)
    fused = Acting(WIDE, {name: copy.deepcopy(module).to(cuda) for name, module in modules.items()}, here)
    reference, limits = Acting(WIDE, modules, plain), FLOAT32 if dtype == torch.float32 else BFLOAT16
    for group in ([3], [1, 1]):
        seen = [observation(WIDE, cameras, 40 + 7 * n, seed=n, steps=3) for n, cameras in enumerate(group)]
        expected = reference.act(*seen)
        for _ in range(2):
            for found, wanted in zip(fused.act(*seen), expected, strict=True):
                limits.check(found, wanted, limits.actions, f"{len(group)} requests")
            fused.driver.capture()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "half"])
@pytest.mark.parametrize(("tokens", "width", "parts"), [(50, 1024, 11), (50, 1024, 1), (7, 100, 3), (400, 48, 1)])
def test_a_gated_norm_in_one_kernel_equals_plain_operations(
    dtype: torch.dtype, tokens: int, width: int, parts: int, cuda: torch.device
) -> None:
    norm, norms, times = AdaNorm(width, 1e-6), 5, 9
    table = TimeTable(torch.randn(norms, times, 3 * width, device=cuda), torch.zeros(1, 1, dtype=torch.int64))
    modulation = Modulation(table, torch.randint(0, times, (tokens,), device=cuda), dtype)
    x = torch.randn(tokens, width, device=cuda)
    slices = torch.randn(parts, tokens, width, device=cuda)
    branch = slices if parts > 1 and dtype != torch.float32 else slices[0].to(dtype)
    for number, given in ((0, None), (1, branch), (norms - 1, branch)):
        out = torch.float32 if number == norms - 1 else dtype
        total, normed = modulation.normed(x, given, norm, number)
        expected = modulation.normed_plain(x, given, norm, number, out)
        assert (total.dtype, normed.dtype) == (torch.float32, out)
        # Slices are added in another order, so that some round to the neighbour.
        is_exact = dtype == torch.float32 or given is None or given.dim() == 2
        assert difference(total, expected[0].cpu(), is_relative=True) < (1e-6 if is_exact else 2e-3)
        limit = 1e-6 if is_exact and out == torch.float32 else 2e-3
        assert difference(normed, expected[1].cpu(), is_relative=True) < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "width", "parts"), [(1, 100, 3), (50, 1024, 8), (413, 1024, 1)])
def test_both_ends_of_a_step_in_a_kernel_each_equal_plain_operations(
    tokens: int, width: int, parts: int, dtype: torch.dtype, cuda: torch.device
) -> None:
    """num_steps and step come as one value for all tokens of a request, or as one for each."""
    from mstar_pi05.kernels import embed_head

    times, places = distinct_times(8)
    table = TimeTable(torch.randn(5, len(times), 3 * width, device=cuda), places.to(cuda))
    into, out_of = (torch.nn.Linear(*sizes, device=cuda).requires_grad_(False) for sizes in ((32, width), (width, 32)))
    frequencies, norm = torch.rand(128, device=cuda), AdaNorm(width, 1e-6)
    outside = embed_head.StepWeights(
        into=into, out_of=out_of, table=table, frequencies=frequencies, eps=norm.eps, dtype=dtype
    )
    actions, scale, offset = torch.randn(3, tokens, 32, device=cuda).unbind()
    slices = torch.randn(parts, tokens, width, device=cuda)
    branch, positions = slices if parts > 1 else slices[0].to(dtype), torch.arange(tokens, device=cuda) + 828
    for num_steps in (torch.tensor(7, device=cuda).expand(tokens), torch.randint(5, 9, (tokens,), device=cuda)):
        step = torch.tensor(4, device=cuda).expand(tokens)
        asked = embed_head.StepInputs(actions=actions, scale=scale, offset=offset, step=step, num_steps=num_steps)
        begun = embed_head.embed(outside, asked, positions)
        rows = table.at(num_steps, step)
        modulation, x = Modulation(table, rows, dtype), into(actions)
        assert torch.equal(begun.rows, rows) and begun.normed.dtype == dtype
        assert difference(begun.x, x.cpu(), is_relative=True) < 1e-6
        normed = modulation.normed_plain(x, None, norm, 0, dtype)[1]
        assert difference(begun.normed, normed.cpu(), is_relative=True) < (2e-6 if dtype == torch.float32 else 4e-3)
        angles = (positions[:, None].float() * frequencies).repeat(1, 2)[:, None]
        for found, wanted in zip(begun.rotation, (angles.cos(), angles.sin()), strict=True):
            assert difference(found, wanted.cpu(), is_relative=False) < 2e-4, "angles of some hundred radians"
        moved, robot = embed_head.head(outside, asked, begun.rows, begun.x, branch)
        last = modulation.normed_plain(x, branch, norm, len(table.modulations) - 1, torch.float32)[1]
        expected = actions - out_of(last) / num_steps[:, None]
        # In half precision slices are added in another order, so that some round to the neighbour.
        limit = 2e-3 if dtype != torch.float32 and parts > 1 else 2e-6
        assert difference(moved, expected.cpu(), is_relative=True) < limit
        assert difference(robot, torch.addcmul(offset, expected, scale).cpu(), is_relative=True) < limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "half"])
@pytest.mark.parametrize(("tokens", "width", "inner"), [(50, 1024, 4096), (1, 128, 512), (64, 256, 1024)])
def test_products_that_hold_their_weights_equal_plain_ones(
    tokens: int, width: int, inner: int, dtype: torch.dtype, cuda: torch.device
) -> None:
    """Captured one behind the other, as they run, and again over other inputs; twice the same bits."""
    from mstar_pi05.kernels import small_gemm

    heads, kv_heads, head_dim = 8, 1, 256

    def drawn(outputs: int, inputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs, device=cuda).div(inputs**0.5).to(dtype)

    packed, up, down = drawn((heads + 2 * kv_heads) * head_dim, width), drawn(2 * inner, width), drawn(width, inner)
    across = drawn(width, heads * head_dim)
    x = torch.randn(tokens, width, device=cuda).to(dtype)
    angle = torch.randn(tokens, 1, head_dim // 2, device=cuda).repeat(1, 1, 2)
    rotation = angle.cos(), angle.sin()
    assert small_gemm.supports(x, inner, heads * head_dim, head_dim)

    def run() -> tuple[torch.Tensor, ...]:
        query, key, value = small_gemm.qkv_rotary(x, packed, rotation, heads, kv_heads)
        opened = small_gemm.gate_up_gelu(x, up)
        return (
            query,
            key,
            value,
            small_gemm.split_k(query.view(tokens, -1), across),
            opened,
            small_gemm.split_k(opened, down),
        )

    with torch.inference_mode():
        graph, found = GraphCache(cuda).capture(run)
        assert found is not None
        for _ in range(2):
            x.normal_()
            graph.replay()
            query, key, value = (x @ packed.T).view(tokens, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
            gate, rise = (x @ up.T).chunk(2, dim=-1)
            opened = torch.nn.functional.gelu(gate, approximate="tanh") * rise
            turned = [rotate(each.float(), *rotation).to(dtype) for each in (query, key)]
            expected = (*turned, value, found[0].view(tokens, -1) @ across.T, opened, found[4] @ down.T)
            for made, wanted in zip(found, expected, strict=True):
                whole = made if made.dtype == dtype else made.sum(0)
                assert difference(whole, wanted.cpu(), is_relative=True) < 1e-2
            first = [each.clone() for each in found]
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


def test_replays_of_the_same_requests_give_the_same_bits(cuda: torch.device) -> None:
    here = place(cuda)
    acting = Acting(WIDE, random_modules(WIDE, here), here)
    seen = [observation(WIDE, 3, 50, seed=n) for n in range(4)]
    acting.act(*seen)
    acting.driver.capture()
    first, second = acting.act(*seen), acting.act(*seen)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_nothing_is_held_after_many_requests(cuda: torch.device) -> None:
    here = place(cuda)
    acting = Acting(WIDE, random_modules(WIDE, here), here)
    for number in range(30):
        acting.act(*[observation(WIDE, 1 + (number + n) % 3, 20 + n, seed=n) for n in range(1 + number % 5)])
        acting.driver.capture()
    memory = acting.driver.runners["LLM"].memory()
    assert (memory.pages_used, memory.slots_used) == (0, 0)
