"""Float8 quantization of linear layers and of experts, in place. Called by the worker after `fuse_projections`.

Each output has one float32 scale. Embeddings, heads, routers and norms keep their dtype. Activations keep theirs too,
unless a node's module lets its products of many tokens round them, one scale per token (`NodeModule.rounds_inputs`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from mstar_core.errors import StartError, did_you_mean
from mstar_core.layers.float8 import can_round_inputs, round_rows
from mstar_core.layers.linear import (
    LinearWeight,
    PreparedLayer,
    QuantizableLayer,
    QuantizedLinear,
    fuse_projections,
)
from mstar_core.layers.moe import Experts
from mstar_core.layers.transformer import Attention, GatedMLP

if TYPE_CHECKING:
    from torch import Tensor

METHODS: Final = {"fp8": torch.float8_e4m3fn}
"""Method name in a deployment -> dtype of the weights."""

KINDS: Final = (Attention, GatedMLP, QuantizableLayer, Experts)
"""Layers of a node with a cache that are quantized."""

DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
PROBE_ROWS: Final = 16
"""Random normal inputs on which each layer's outputs are compared. Of experts, the first one's."""

EXPERT_STEP: Final = 32
"""Inputs of one float8 instruction of the experts' kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindReport:
    """Errors and sizes of the quantized layers of one kind. layers: their number. Sizes include the scales.

    Errors of outputs are ||quantized - before|| / ||before||, over these layers.
    """

    layers: int
    output_error_mean: float
    output_error_worst: float
    before_bytes: int
    after_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationReport:
    """Result of `quantize` by kind of layer: q_proj, k_proj, ..."""

    method: str
    kinds: dict[str, KindReport]

    @property
    def before_bytes(self) -> int:
        """Bytes of these layers before quantization."""
        return sum(kind.before_bytes for kind in self.kinds.values())

    @property
    def after_bytes(self) -> int:
        """Bytes of these layers after quantization."""
        return sum(kind.after_bytes for kind in self.kinds.values())


@dataclass(frozen=True, slots=True)
class _LayerReport:
    """Error and sizes of one quantized layer."""

    output_error: float
    before_bytes: int
    after_bytes: int


def quantize(
    module: nn.Module,
    method: str,
    kinds: tuple[type[nn.Module], ...] = KINDS,
    *,
    rounds_inputs: bool = False,
    kept: Collection[str] = (),
) -> QuantizationReport:
    """Quantize the projections of every layer of these kinds, layer by layer, and free the old weights.

    rounds_inputs: round the inputs of products of many tokens to float8 too, where the device has the kernels. The
    reported errors are then of both. kept: names of submodules whose layers keep their dtype.
    Raises StartError (phase `weights`) for an unsupported method, dtype or device, before anything changes.
    """
    owners = _owners(module, kinds, kept)
    reports = _quantize_layers(owners, _dtype_of(method), rounds_inputs=rounds_inputs)
    return _whole_report(method, reports)


def quantize_onto(
    device: torch.device,
    module: nn.Module,
    method: str,
    kinds: tuple[type[nn.Module], ...] = KINDS,
    *,
    rounds_inputs: bool = False,
    kept: Collection[str] = (),
    place: Callable[[nn.Module, torch.device], object] = nn.Module.to,
) -> QuantizationReport:
    """Move a module to a device layer by layer, fusing and quantizing each there before the next one.

    The device never holds the weights in half precision, beside those of one layer. The result is that of moving the
    module, `fuse_projections` and `quantize`. place: moves a layer, or the rest of the module, to the device.
    Raises as `quantize`, with the layers before moved.
    """
    dtype = _dtype_of(method)
    reports: dict[str, list[_LayerReport]] = {}
    done: set[nn.Module] = set()
    quantized = set(_owners(module, kinds, kept))
    for layer in list(module.modules()):
        if layer in done or not isinstance(layer, (PreparedLayer, *kinds)):
            continue
        place(layer, device)
        fuse_projections(layer)
        owners = [each for each in layer.modules() if each in quantized]
        for name, figures in _quantize_layers(owners, dtype, rounds_inputs=rounds_inputs).items():
            reports.setdefault(name, []).extend(figures)
        done.update(layer.modules())
    place(module, device)
    return _whole_report(method, reports)


def _owners(module: nn.Module, kinds: tuple[type[nn.Module], ...], kept: Collection[str]) -> list[nn.Module]:
    """Return the layers to quantize, in the module's order."""
    left = {layer for name in kept for layer in module.get_submodule(name).modules()}
    return [layer for layer in module.modules() if isinstance(layer, kinds) and layer not in left]


def _quantize_layers(
    owners: Sequence[nn.Module], dtype: torch.dtype, *, rounds_inputs: bool
) -> dict[str, list[_LayerReport]]:
    for owner in owners:
        for name, weight in _weights(owner):
            _check(f"{type(owner).__name__}.{name}", weight)
            if isinstance(owner, Experts):
                _check_experts(weight)
    reports: dict[str, list[_LayerReport]] = {}
    with torch.no_grad():
        for owner in owners:
            found = (
                _quantize_experts(owner, dtype, rounds_inputs=rounds_inputs)
                if isinstance(owner, Experts)
                else _quantize_projections(owner, dtype, rounds_inputs=rounds_inputs)
            )
            for name, layer_report in found:
                reports.setdefault(name, []).append(layer_report)
    return reports


def _quantize_projections(
    owner: nn.Module, dtype: torch.dtype, *, rounds_inputs: bool
) -> Iterator[tuple[str, _LayerReport]]:
    was_fused = isinstance(owner, PreparedLayer) and owner.unfuse()
    for name, layer in _projections(owner):
        weight = layer.weight.detach()
        quantized = _to_weight(weight, dtype, rounds_inputs=rounds_inputs)
        assert quantized.scale is not None
        bias = None if layer.bias is None else layer.bias.detach()
        parent, _, own = name.rpartition(".")
        taken = QuantizedLinear(quantized.values, quantized.scale, bias, rounds_inputs=quantized.rounds_inputs)
        setattr(owner.get_submodule(parent), own, taken)
        yield name, _compared(weight, quantized)
        del layer, weight
    if was_fused and isinstance(owner, PreparedLayer):
        owner.fuse_projections()


def _quantize_experts(
    experts: Experts, dtype: torch.dtype, *, rounds_inputs: bool
) -> Iterator[tuple[str, _LayerReport]]:
    made: dict[str, tuple[Tensor, Tensor]] = {}
    rounds = rounds_inputs and all(can_round_inputs(weight, EXPERT_STEP) for _, weight in _weights(experts))
    for name, weight in list(_weights(experts)):
        values, scales = torch.empty_like(weight, dtype=dtype), weight.new_empty(weight.shape[:2], dtype=torch.float32)
        for expert, one in enumerate(weight):
            quantized = to_float8(one, dtype)
            assert quantized.scale is not None
            # As bytes, because not every device copies float8.
            values[expert].view(torch.uint8).copy_(quantized.values.view(torch.uint8))
            scales[expert] = quantized.scale
        made[name] = values, scales
        first = LinearWeight(values[0], scales[0], rounds)
        compared = _compared(weight[0], first)
        before, after = weight.numel() * weight.element_size(), values.numel() + scales.numel() * 4
        yield name, _LayerReport(compared.output_error, before, after)
    experts.replace(made["gate_up_proj"], made["down_proj"], rounds_inputs=rounds)


def quantized_weights(
    module: nn.Module, kinds: tuple[type[nn.Module], ...] = KINDS, kept: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a module that `quantize` converts, each once, by the name in their layer."""
    seen = set[tuple[nn.Module, str]]()
    for owner in _owners(module, kinds, kept):
        for name, weight in _weights(owner):
            if (owner, name) not in seen:
                seen.add((owner, name))
                yield name, weight


def to_float8(weight: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> LinearWeight:
    """Scale each output so that its largest value becomes the largest of the dtype. weight: [outputs, inputs]."""
    wide = weight.float()
    largest = torch.finfo(dtype).max
    # An output of zeros needs a scale above zero.
    scale = (wide.abs().amax(dim=1) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    return LinearWeight((wide / scale[:, None]).clamp(-largest, largest).to(dtype), scale)


def _to_weight(weight: Tensor, dtype: torch.dtype, *, rounds_inputs: bool) -> LinearWeight:
    rounds = rounds_inputs and can_round_inputs(weight)
    return replace(to_float8(weight, dtype), rounds_inputs=rounds)


def _dtype_of(method: str) -> torch.dtype:
    if method not in METHODS:
        raise StartError(
            f"unknown quantization {method!r}",
            f"known: {', '.join(METHODS)}",
            did_you_mean(method, METHODS),
            phase="weights",
        )
    return METHODS[method]


def _projections(owner: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    layers = owner.named_modules() if isinstance(owner, QuantizableLayer) else owner.named_children()
    yield from ((name, layer) for name, layer in list(layers) if isinstance(layer, nn.Linear))


def _weights(owner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a layer that are quantized, by name."""
    if isinstance(owner, Experts):
        yield from (("gate_up_proj", owner.gate_up_proj.detach()), ("down_proj", owner.down_proj.detach()))
    else:
        yield from ((name, layer.weight.detach()) for name, layer in _projections(owner))


def _check_experts(weight: Tensor) -> None:
    """Refuse experts on a GPU without Triton: their grouped GEMM has no other form there."""
    if weight.is_cuda and find_spec("triton") is None:
        raise StartError(
            "float8 experts need triton on a GPU",
            "it is not installed, and dequantized per expert each step would wait for the host",
            "install a CUDA build of torch, or remove quantization from the config",
            phase="weights",
        )


def _check(name: str, weight: Tensor) -> None:
    if weight.dtype not in DTYPES:
        kept = str(weight.dtype).removeprefix("torch.")
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise StartError(
            f"{name} cannot be quantized",
            f"its weights are {kept}; supported: {known}",
            "load it in one of these dtypes",
            phase="weights",
        )
    if weight.device.type not in ("cpu", "cuda"):
        raise StartError(
            f"{name} cannot be quantized",
            f"its weights are on {weight.device}; supported: cpu, cuda",
            "load the weights first",
            phase="weights",
        )
    if weight.is_cuda and torch.cuda.get_device_capability(weight.device) < (8, 9):
        major, minor = torch.cuda.get_device_capability(weight.device)
        raise StartError(
            "this GPU does not support float8",
            f"its compute capability is {major}.{minor}; float8 needs 8.9 or later",
            "remove quantization from the config",
            phase="weights",
        )


def _compared(weight: Tensor, quantized: LinearWeight) -> _LayerReport:
    assert quantized.scale is not None
    before, after = weight.float(), quantized.dequantized(torch.float32)
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(PROBE_ROWS, weight.shape[1], generator=generator, device=weight.device)
    size = (
        quantized.values.numel() * quantized.values.element_size()
        + quantized.scale.numel() * quantized.scale.element_size()
    )
    expected = x @ before.T
    norm = float(expected.norm())
    if quantized.rounds_inputs:
        rounded, scale = round_rows(x)
        x = rounded.float() * scale[:, None]
    error = float((x @ after.T - expected).norm()) / norm if norm else 0.0
    return _LayerReport(error, weight.numel() * weight.element_size(), size)


def _whole_report(method: str, reports: dict[str, list[_LayerReport]]) -> QuantizationReport:
    return QuantizationReport(method=method, kinds={name: _report(figures) for name, figures in reports.items()})


def _report(reports: list[_LayerReport]) -> KindReport:
    outputs = [report.output_error for report in reports]
    return KindReport(
        layers=len(reports),
        output_error_mean=sum(outputs) / len(reports),
        output_error_worst=max(outputs),
        before_bytes=sum(report.before_bytes for report in reports),
        after_bytes=sum(report.after_bytes for report in reports),
    )
