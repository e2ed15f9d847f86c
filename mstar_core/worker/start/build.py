"""Construction of a rank's runners: nodes with their weights, KV pools, warm-up. Reports each start-up phase."""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import torch

from mstar_core.config.deployment import DeploymentSpec, RankPlan
from mstar_core.constraints.matcher import Grammars
from mstar_core.engine.attention.flashinfer import HEAD_DIMS
from mstar_core.engine.cache.sizing import (
    PoolPlan,
    PoolRequest,
    mib,
    node_shares,
    plan_pool,
    rank_budget,
)
from mstar_core.engine.cuda_graphs.cache import CaptureSizes, GraphCache, sizes_for
from mstar_core.engine.cuda_graphs.compilation import prepare_compiler
from mstar_core.engine.cuda_graphs.kernel_log import KernelLog
from mstar_core.engine.device import (
    await_free_memory,
    check_device,
    free_bytes,
    limit_memory,
    prepare_device,
    resolve_device,
)
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.kv.settings import KVSettings
from mstar_core.engine.late_warmup import LateWarmup
from mstar_core.engine.module import node_module
from mstar_core.engine.runner import NodeRunner
from mstar_core.engine.stateless.engine import StatelessEngine
from mstar_core.engine.warmup import run_warmup
from mstar_core.errors import ConfigError, PluginError, StartError, did_you_mean
from mstar_core.graph import KV_CACHE, NodeSpec
from mstar_core.graph.declare.nodes import KVSpec
from mstar_core.host.cache_dir import TRITON_CACHE
from mstar_core.host.kernel_pack import install_named
from mstar_core.layers.linear import QuantizableLayer, fuse_projections
from mstar_core.layers.lora import AdapterLimits
from mstar_core.layers.transformer import adapt_layers
from mstar_core.parallel.shards import local_kv_heads
from mstar_core.plugin.model import Model, ModelContext
from mstar_core.plugin.processor import ConstrainableProcessor
from mstar_core.plugin.spec import ModelSpec
from mstar_core.targets import load_target
from mstar_core.weights.deferred import DeferredWeights
from mstar_core.worker.start.compile_pass import TracedNode, compile_rank
from mstar_core.worker.start.warmup import (
    needs_samples,
    rehearse,
    samples_only_ids,
    warm_module,
    warm_prefill,
    warm_walks,
)
from mstar_core.worker.state.walks import resident_loops

if TYPE_CHECKING:
    from torch import nn

    from mstar_core.constraints.vocabulary import TokenTable
    from mstar_core.engine.group.link import PlanSender
    from mstar_core.layers.kv_view import KVModule
    from mstar_core.layers.lora import AdapterBank
    from mstar_core.layers.quantize import QuantizationReport
    from mstar_core.parallel.groups import RankGroup
    from mstar_core.process.life import ChildLife

log = logging.getLogger(__name__)

PROGRESS_S: Final = 0.1
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LoadedNode = tuple[NodeSpec, "nn.Module", int]
"""A node with its module and the size of its vocabulary."""

STAGING_MARGIN: Final = 2 << 30
"""Bytes that a GPU keeps beside the weights while they are loaded."""

CUDA_DTYPE, CPU_DTYPE = "bfloat16", "float32"
PRELOADED: Final = ("triton", "flashinfer", "flashinfer.jit.attention.modules")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLead:
    """The tensor-parallel group that a rank leads. nodes: those that its ranks compute together."""

    group: RankGroup
    sender: PlanSender
    nodes: tuple[str, ...]


def compute_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """Return the compute dtype: the config's, or bfloat16 on CUDA and float32 on CPU. Raises ConfigError."""
    chosen = name or (CUDA_DTYPE if device.type == "cuda" else CPU_DTYPE)
    if chosen not in DTYPES:
        raise ConfigError(f"dtype {chosen!r} is not known", hint=did_you_mean(chosen, DTYPES), key="dtype")
    return DTYPES[chosen]


def open_device(rank: RankPlan, life: ChildLife) -> torch.device:
    """Prepare the device of a rank and return it. Raises StartError if it cannot compute."""
    life.phase("device", detail=rank.device)
    device = resolve_device(rank.device)
    prepare_device(device)
    check_device(device)
    if life.incarnation > 1:
        await_free_memory(device)  # of the process that this one replaces
    return device


def build_runners(
    spec: DeploymentSpec,
    model: ModelSpec,
    rank: RankPlan,
    life: ChildLife,
    device: torch.device,
    kernels: KernelLog,
    lead: GroupLead | None = None,
    late: LateWarmup | None = None,
    place: Callable[[Mapping[str, NodeRunner]], object] = len,
) -> dict[str, NodeRunner]:
    """Load the rank's nodes and return their runners. Raises StartError and WeightsError with the cause.

    place: called with the runners before anything is captured, after which their memory may not move. kernels: counts
    the kernels that the start compiles. lead: the group that this rank leads, whose nodes are sharded. late: takes
    the warm-up of a worker that serves before it.
    """
    nodes = own_nodes(model, rank)
    group = lead.group if lead is not None else None
    shared = frozenset(lead.nodes) if lead is not None else frozenset[str]()
    loaded, runners = build_nodes(spec, model, rank, life, device, nodes, group, shared)
    place(runners)
    if lead is not None:
        for name in rank.nodes:
            runner = runners.get(name)
            if name in shared and isinstance(runner, KVCacheEngine | StatelessEngine):
                runner.lead(lead.sender, lead.group.collectives, lead.group.place.size)
    if device.type == "cuda":
        _warm_up(spec, model, rank, loaded, runners, life, kernels, shared, late)
    return runners


def build_nodes(
    spec: DeploymentSpec,
    model: ModelSpec,
    rank: RankPlan,
    life: ChildLife,
    device: torch.device,
    nodes: Sequence[NodeSpec],
    group: RankGroup | None,
    shared: frozenset[str],
) -> tuple[list[LoadedNode], dict[str, NodeRunner]]:
    """Load nodes and make their engines, in lockstep with the other ranks of a group. shared: nodes of the group."""
    dtype = compute_dtype(spec.dtype, device)
    has_attention = any(node.kv is not None and attention_of(spec, device, node.kv) == "flashinfer" for node in nodes)
    preloading = preload(PRELOADED if has_attention else PRELOADED[:1]) if device.type == "cuda" else None
    life.phase("weights")
    limit = rank.memory_bytes if spec.memory_limit else None
    limit_memory(device, limit)
    with fitting(rank, limit):
        loaded, banks = load_prepared(spec, model, device, nodes, group, shared, _weight_progress(life))
    life.phase("kv")
    working = sum(node_module(module).working_bytes(spec.token_budget) for _, module, _ in loaded)  # steps overlap
    plans = pool_plans(spec, rank, [node for node, _, _ in loaded], device, dtype, working)
    if group is not None:
        plans = {name: _agreed(plan, group) if name in shared else plan for name, plan in plans.items()}
    for name, plan in plans.items():
        life.phase("kv", done=plan.pages, total=plan.pages, detail=f"{name}: {plan.text}")
    life.phase("kv", facts={"caches": {name: f"{plan.text}; {plan.why_free}" for name, plan in plans.items()}})
    life.phase("kernels")
    if preloading is not None:
        preloading.join()
    runners: dict[str, NodeRunner] = {}
    for node, module, vocab in loaded:
        if node.engine is KV_CACHE:
            captures = GraphCache(device, spare_bytes=working)
            runners[node.name] = _kv_runner(
                spec, model, node, module, vocab, device, dtype, plans[node.name], life, captures, banks.get(node.name)
            )
        else:
            runners[node.name] = StatelessEngine(
                node,
                module,
                device=device,
                dtype=compute_dtype(node.dtype or spec.dtype, device),
                max_batch=largest_batch(device),
                lookahead=lookahead_on(device),
            )
    return loaded, runners


@contextmanager
def fitting(rank: RankPlan, limit: int | None) -> Iterator[None]:
    """Turn a shortage of device memory in the block, which loads a rank's weights, into a StartError.

    limit: bytes that it may take of its device, None for all of it.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        room, wider = rank.device, ""
        if limit is not None:
            room, wider = f"its memory budget of {mib(limit)}", ", or raise memory_budget"
        raise StartError(
            f"the weights of rank {rank.rank} do not fit {room}",
            str(error).splitlines()[0],
            f"set quantization: fp8, or place its nodes on more devices{wider}",
            phase="weights",
        ) from error


def load_prepared(
    spec: DeploymentSpec,
    model: ModelSpec,
    device: torch.device,
    nodes: Sequence[NodeSpec],
    group: RankGroup | None,
    shared: frozenset[str],
    progress: Callable[[int, int, str], None],
) -> tuple[list[LoadedNode], dict[str, AdapterBank]]:
    """Load nodes, fuse and quantize their weights, and make room for LoRA adapters. See `build_nodes`.

    A wake from level 2 calls this again: every step has the same result as at the start.
    """
    dtype = compute_dtype(spec.dtype, device)
    context = ModelContext(
        spec=model,
        folder=Path(spec.folder) if spec.folder else None,
        device=device,
        dtype=dtype,
        model_kwargs=spec.model_kwargs,
        progress=progress,
    )
    own = [node for node in nodes if node.name not in shared]
    total = sum(node.weight_bytes for node in own)
    deferred = DeferredWeights(lambda done, _: progress(done, max(done, total), "layers"))
    quantized = quantized_alone(spec, own, device)
    loaded = load_nodes(model, context, [node for node in own if node.name not in quantized])
    if quantized:
        # A model that does not defer its weights reads those that the device cannot hold into host memory.
        fits = total + STAGING_MARGIN <= free_bytes(device)
        apart = replace(context, device=device if fits else torch.device("cpu"), deferred=deferred)
        loaded += load_nodes(model, apart, [node for node in own if node.name in quantized])
        loaded.sort(key=lambda each: own.index(each[0]))
    if group is not None:
        sharded = replace(context, shard=group.shard)
        parts = [local_node(node, sharded.shard.size) for node in nodes if node.name in shared]
        loaded += load_nodes(model, sharded, parts)
    _prepare(spec, loaded, device, dtype, deferred)
    return loaded, adapter_banks(spec, loaded)


def local_node(node: NodeSpec, size: int) -> NodeSpec:
    """Return a node as each rank of a group of `size` holds it: with its part of the KV heads."""
    if size == 1 or node.kv is None:
        return node
    return replace(node, kv=replace(node.kv, kv_heads=local_kv_heads(node.kv.kv_heads, size)))


def _agreed(plan: PoolPlan, group: RankGroup) -> PoolPlan:
    """Return the pool that fits every rank of a group."""
    pages = group.smallest(plan.pages)
    if pages == plan.pages:
        return plan
    why = f"{plan.why}; the smallest of the group"
    return replace(plan, pages=pages, size_bytes=plan.size_bytes // plan.pages * pages, why=why)


def _warm_up(
    spec: DeploymentSpec,
    model: ModelSpec,
    rank: RankPlan,
    loaded: Sequence[LoadedNode],
    runners: dict[str, NodeRunner],
    life: ChildLife,
    kernels: KernelLog,
    shared: frozenset[str],
    late: LateWarmup | None,
) -> None:
    """Compile, capture and load the kernels of a GPU's nodes, in this order, or leave that to `late`.

    shared: nodes of a tensor-parallel group. Their modules cannot run alone, so their kernels are compiled when the
    group captures its first steps.
    """
    need_samples = {node.name for node, module, _ in loaded if needs_samples(node, module)}

    def walks(report: Callable[[str], None], level: int) -> None:
        warm_walks(model, rank.rank, runners, need_samples, spec.max_seq_len, report, level)

    kernels.listen()
    nodes = [TracedNode(spec=node, runner=runners[node.name], module=module) for node, module, _ in loaded]
    alone = [node for node in nodes if node.spec.name not in shared]

    if late is not None:
        plan_late(late, nodes, shared, lambda: walks(lambda sample: None, logging.DEBUG))
        return

    def traced_walks() -> None:
        if not shared:
            walks(lambda sample: None, logging.DEBUG)

    with kernels.compiling_ahead():
        compile_rank(alone, traced_walks, partial(_report_compiled, life, kernels))
    for node in nodes:
        node.runner.capture()
    for node in nodes:
        life.phase("warm", detail=node.spec.name)
        if node.spec.name not in shared:
            warm_module(node.module)
        if samples_only_ids(node.spec):
            warm_prefill(node.runner, node.spec)
    warm_up_nodes([(node.runner, node.module) for node in nodes], life)
    walks(lambda sample: life.phase("warm", detail=f"sample {sample}"), logging.WARNING)
    for node in alone:
        life.phase("capture", detail=f"{node.spec.name}: prompts of single requests")
        node.runner.capture_usual()
    if spec.warm == "full":
        capture_planned({node.spec.name: node.runner for node in nodes}, life)
    rehearse(
        model, rank.rank, runners, spec.max_seq_len, lambda sample: life.phase("warm", detail=f"once more: {sample}")
    )


def capture_planned(runners: Mapping[str, NodeRunner], life: ChildLife) -> None:
    """Capture all that is planned by now, also what the warm-up has met. Reports each capture."""
    for name, runner in runners.items():
        counts = runner.graph_counts
        while counts is not None and (left := counts.planned()):
            life.phase("capture", done=counts.captured, total=counts.captured + left, detail=name)
            if not runner.idle():
                break


def plan_late(late: LateWarmup, nodes: Sequence[TracedNode], shared: frozenset[str], walks: Callable[[], None]) -> None:
    """Leave the warm-up of nodes to `late`. walks: runs the model's samples.

    Each node's largest decode step comes first. Kernels need no pass of their own: the first life has compiled them.
    """
    late.runners = {node.spec.name: node.runner for node in nodes}
    for node in nodes:
        node.runner.queue_captures()
    late.pieces += [node.runner.idle for node in nodes]
    late.pieces += [partial(warm_module, node.module) for node in nodes if node.spec.name not in shared]
    for node in nodes:
        if samples_only_ids(node.spec):
            late.requests.append(partial(warm_prefill, node.runner, node.spec))
        if requests := node_module(node.module).warmup_requests():
            late.requests.append(partial(run_warmup, node.runner, requests, lambda what: None))
    late.requests.append(walks)


def _report_compiled(life: ChildLife, kernels: KernelLog, done: int, total: int) -> None:
    kernels.ahead = max(kernels.ahead, done)
    life.phase("kernels", done=done, total=total, detail="kernels")


def warm_up_nodes(nodes: Sequence[tuple[NodeRunner, nn.Module]], life: ChildLife) -> None:
    """Run the modules' own warm-up requests (`requests`) and capture the CUDA graphs that they need."""
    for runner, module in nodes:
        requests = node_module(module).warmup_requests()
        if requests:
            run_warmup(runner, requests, partial(_report_capture, life, runner.name))


def _report_capture(life: ChildLife, name: str, what: str) -> None:
    life.phase("capture", detail=f"{name}: {what}")


def _prepare(
    spec: DeploymentSpec,
    loaded: list[tuple[NodeSpec, nn.Module, int]],
    device: torch.device,
    dtype: torch.dtype,
    deferred: DeferredWeights,
) -> None:
    """Fuse and quantize the weights of KV nodes on a GPU, and quantize the layers of other nodes that ask for it.

    deferred: reads the weights of layers that are moved to the device. Raises ConfigError if a quantization cannot run.
    """
    kind = spec.quantization
    if kind != "none" and device.type == "cuda" and dtype == torch.float32:
        raise ConfigError(
            f"quantization {kind} needs bfloat16 or float16 on a GPU",
            f"this rank computes in {str(dtype).removeprefix('torch.')} on {device}",
            "leave quantization out",
            key="quantization",
        )
    for node, module, _ in loaded:
        first = next(module.parameters(), None)
        is_staged = first is not None and first.device.type != device.type
        if node.engine is KV_CACHE and device.type == "cuda" and not is_staged:
            fuse_projections(module)
        if kind != "none":
            code = importlib.import_module("mstar_core.layers.quantize")
            quantize = partial(code.quantize_onto, device, place=deferred.place) if is_staged else code.quantize
            own = node_module(module)
            kinds = {} if node.engine is KV_CACHE else {"kinds": (QuantizableLayer,)}
            report = quantize(module, kind, **kinds, rounds_inputs=own.rounds_inputs, kept=own.unquantized)
            if report.kinds:
                log.info("node %s: %s", node.name, quantized_text(report))


def quantized_alone(spec: DeploymentSpec, nodes: Sequence[NodeSpec], device: torch.device) -> frozenset[str]:
    """Return the nodes whose layers are moved to a GPU and quantized one by one."""
    if spec.quantization == "none" or device.type != "cuda":
        return frozenset()
    return frozenset(node.name for node in nodes if node.engine is KV_CACHE)


def adapter_banks(spec: DeploymentSpec, loaded: Sequence[LoadedNode]) -> dict[str, AdapterBank]:
    """Reserve memory for LoRA adapters in the nodes that take them, before pools are sized. Raises StartError."""
    if not spec.lora.max_adapters:
        return {}
    limits = AdapterLimits.of(spec.lora.max_adapters, spec.lora.max_rank or 1)
    banks = {}
    for node, module, _ in loaded:
        if node.adapter_prefix is None:
            continue
        try:
            bank = adapt_layers(module, limits, node.adapter_prefix)
        except torch.OutOfMemoryError as error:
            raise StartError(
                f"the room for {limits.count} LoRA adapters of rank {limits.rank} does not fit",
                str(error).splitlines()[0],
                "lower lora.max_adapters or lora.max_rank",
                phase="weights",
            ) from error
        log.info(
            "node %s: room for %d LoRA adapters of rank %d: %s",
            node.name,
            limits.count,
            limits.rank,
            mib(bank.size_bytes),
        )
        banks[node.name] = bank
    return banks


def load_nodes(
    model: ModelSpec, context: ModelContext, nodes: Sequence[NodeSpec]
) -> list[tuple[NodeSpec, nn.Module, int]]:
    """Return the nodes with weights of their own, their modules and vocabularies.

    Raises PluginError without code, or if a vocabulary is not the declared one.
    """
    if model.model is None:
        raise PluginError(
            f"the model code of {model.name} is not part of this version",
            "its plugin declares the graph only",
            "see which models can run with: mstarctl models ls",
            plugin=model.plugin,
        )
    code: Model = load_target(model.model)(context)
    loaded = [(node, code.get_submodule(node), code.vocab_size(node)) for node in nodes if node.of is None]
    for node, _, vocab in loaded:
        declared = node.sampling.vocab if node.sampling is not None else 0
        if declared not in (0, vocab):
            raise PluginError(
                f"node {node.name} declares a vocabulary of {declared} ids and has {vocab}",
                hint="let Sampling.vocab and the model's vocab_size agree",
                plugin=model.plugin,
            )
    return loaded


def own_nodes(model: ModelSpec, rank: RankPlan) -> list[NodeSpec]:
    """Return the nodes that a rank loads: a cache branch on a rank of its own needs the whole node there."""
    return list(dict.fromkeys(model.node(name).owner for name in rank.nodes))


def _kv_runner(
    spec: DeploymentSpec,
    model: ModelSpec,
    node: NodeSpec,
    module: nn.Module,
    vocab: int,
    device: torch.device,
    dtype: torch.dtype,
    plan: PoolPlan,
    life: ChildLife,
    captures: GraphCache,
    adapters: AdapterBank | None,
) -> KVCacheEngine:
    assert node.kv is not None, "the graph check admits no KV node without a cache"
    slots = node.kv.slots(spec.rank_slots)
    settings = KVSettings(
        device=device,
        dtype=dtype,
        num_pages=plan.pages,
        page_size=plan.page_size,
        max_slots=slots,
        max_seq_len=spec.max_seq_len,
        vocab=vocab,
        token_budget=spec.token_budget,
        image_share=spec.image_share,
        attention=attention_of(spec, device, node.kv),
        lookahead=lookahead_on(device),
        steps_at_once=spec.steps_at_once if lookahead_on(device) else 1,
        loop=resident_loops(model).get(node.name),
        graphs=sizes_for(slots) if device.type == "cuda" else CaptureSizes(),
        prefix_cache=spec.kv_cache.prefix_cache,
        adapters=adapters,
        grammars=grammars_of(spec, model, node, vocab),
    )
    return KVCacheEngine(
        node,
        cast("KVModule", module),  # checked by the plugin's conformance, not by a base class
        settings,
        report=lambda phase, step: life.phase(phase, detail=f"{node.name}: {step}"),
        captures=captures,
        is_captured=device.type != "cuda",
    )


def grammars_of(spec: DeploymentSpec, model: ModelSpec, node: NodeSpec, vocab: int) -> Grammars | None:
    """Return the compiler of grammars for a text head; None for other nodes. It reads the vocabulary when needed."""
    target = model.processor
    if node.sampling is None or not node.sampling.is_text or target is None:
        return None

    def load() -> TokenTable:
        processor = load_target(target)(Path(spec.folder) if spec.folder else None, spec.model_kwargs)
        if not isinstance(processor, ConstrainableProcessor):
            raise PluginError(
                f"the processor of {model.name} has no vocabulary for grammars",
                f"node {node.name} declares text",
                "add token_table to the processor",
                plugin=model.plugin,
            )
        return processor.token_table()

    return Grammars(load, vocab)


def pool_plans(
    spec: DeploymentSpec,
    rank: RankPlan,
    nodes: Sequence[NodeSpec],
    device: torch.device,
    dtype: torch.dtype,
    working: int = 0,
) -> dict[str, PoolPlan]:
    """Return the KV pool of each node of a rank, after its weights are loaded. Raises StartError if one does not fit.

    working: bytes that the largest steps take beside weights and pools.
    """
    cache = spec.kv_cache
    kv_nodes = [(node, node.kv) for node in nodes if node.engine is KV_CACHE and node.kv is not None]
    if not kv_nodes:
        return {}
    fraction = cache.memory_fraction if rank.memory_fraction is None else rank.memory_fraction
    size = rank.memory_bytes
    if size is not None and spec.memory_limit:
        size = int(size * cache.memory_fraction)  # the rest is for graphs, as on a whole device
    budget = rank_budget(device, fraction, cache.reserve_bytes, working, size_bytes=size).check()
    shares = node_shares([node.name for node, _ in kv_nodes], cache.share)
    request = PoolRequest(page_size=cache.page_size, pages=cache.pages, tokens=cache.tokens)
    plans: dict[str, PoolPlan] = {}
    for node, kv in kv_nodes:
        slots = kv.slots(spec.rank_slots)
        share = shares[node.name]
        why = budget.sum_text if share == 1 else f"{share:.4g} of {budget.sum_text}"
        plans[node.name] = plan_pool(
            kv,
            request,
            node=node.name,
            dtype=dtype,
            free_bytes=int(budget.pool_bytes * share),
            longest=spec.max_seq_len,
            most_tokens=slots * spec.max_seq_len,
            why_free=why,
        )
        log.info("node %s: %s; %s", node.name, plans[node.name].text, why)
    budget.check_free(sum(plan.size_bytes for plan in plans.values()))
    return plans


def quantized_text(report: QuantizationReport) -> str:
    """Return `fp8 weights: 5,376 to 2,690 MiB; outputs differ by q_proj 0.0263 (worst 0.0270), ...`."""
    errors = (
        f"{name} {kind.output_error_mean:.4f} (worst {kind.output_error_worst:.4f})"
        for name, kind in report.kinds.items()
    )
    sizes = f"{mib(report.before_bytes)} to {mib(report.after_bytes)}"
    return f"{report.method} weights: {sizes}; outputs differ by {', '.join(errors)}"


def attention_of(spec: DeploymentSpec, device: torch.device, kv: KVSpec) -> str:
    """Return the attention backend of a KV node on a device.

    By default heads of a size that FlashInfer has no kernels for use PyTorch. Only miniatures have such heads.
    """
    return spec.attention or ("flashinfer" if device.type == "cuda" and kv.head_dim in HEAD_DIMS else "torch")


def preload(modules: Sequence[str]) -> threading.Thread:
    """On a thread, while weights are read: install packed kernels, import dependencies of kernels, prepare Triton."""

    def run() -> None:
        install_kernels()
        for name in modules:
            with suppress(ImportError):  # the node that needs it raises an error that names the package
                importlib.import_module(name)
        with suppress(Exception):  # each is done again when it is needed, where an error is raised
            prepare_compiler()

    thread = threading.Thread(target=run, name="preload", daemon=True)
    thread.start()
    return thread


def install_kernels() -> None:
    """Install the packs of kernels that the environment names. A pack that cannot be read is logged."""
    cache = os.environ.get(TRITON_CACHE)
    if cache is None:
        return
    started = time.monotonic()
    try:
        new = install_named(Path(cache))
    except (ConfigError, OSError) as error:
        log.warning("packed kernels are not installed: %s", error)
        return
    if new:
        log.info("%d packed kernels and launchers installed in %.2f s", new, time.monotonic() - started)


def largest_batch(device: torch.device) -> int:
    """Return the maximum batch of a stateless step; a CPU runs its items one by one and must not stall decode."""
    return 64 if device.type == "cuda" else 8


def lookahead_on(device: torch.device) -> int:
    """Return the number of steps to queue behind the running one; on a CPU a launch computes the step."""
    return 1 if device.type == "cuda" else 0


def _weight_progress(life: ChildLife) -> Callable[[int, int, str], None]:
    next_s = 0.0

    def report(done: int, total: int, file: str) -> None:
        nonlocal next_s
        now = time.monotonic()
        if now >= next_s or done >= total:
            next_s = now + PROGRESS_S
            life.phase("weights", done=done, total=total, detail=Path(file).name)

    return report
