"""Weight-only float8 quantization of linear layers, in place. Called by the worker after `fuse_projections`.

Each output has one float32 scale. Activations, embeddings and norms keep their dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from mstar_core.errors import StartError, did_you_mean
from mstar_core.layers.linear import LinearWeight, QuantizableLayer, QuantizedLinear
from mstar_core.layers.transformer import Attention, GatedMLP

if TYPE_CHECKING:
    from torch import Tensor

METHODS: Final = {"fp8": torch.float8_e4m3fn}
"""Method name in a deployment -> dtype of the weights."""

DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
PROBE_ROWS: Final = 16
"""Random normal inputs on which each layer's outputs are compared."""


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
    module: nn.Module, method: str, kinds: tuple[type[nn.Module], ...] = (Attention, GatedMLP, QuantizableLayer)
) -> QuantizationReport:
    """Quantize the projections of every layer of these kinds, layer by layer, and free the old weights.

    Raises StartError (phase `weights`) for an unsupported method, dtype or device, before anything changes.
    """
    dtype = _dtype_of(method)
    owners = [layer for layer in module.modules() if isinstance(layer, kinds)]
    for owner in owners:
        for name, layer in _projections(owner):
            _check(f"{type(owner).__name__}.{name}", layer.weight)
    reports: dict[str, list[_LayerReport]] = {}
    with torch.no_grad():
        for owner in owners:
            was_fused = isinstance(owner, Attention | GatedMLP) and owner.unfuse()
            for name, layer in _projections(owner):
                quantized, figures = _quantized(layer.weight.detach(), dtype)
                bias = None if layer.bias is None else layer.bias.detach()
                assert quantized.scale is not None
                parent, _, own = name.rpartition(".")
                setattr(owner.get_submodule(parent), own, QuantizedLinear(quantized.values, quantized.scale, bias))
                reports.setdefault(name, []).append(figures)
            if was_fused and isinstance(owner, Attention | GatedMLP):
                owner.fuse_projections()
            del layer
    return QuantizationReport(
        method=method, kinds={name: _report(kind_reports) for name, kind_reports in reports.items()}
    )


def to_float8(weight: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> LinearWeight:
    """Scale each output so that its largest value becomes the largest of the dtype. weight: [outputs, inputs]."""
    wide = weight.float()
    largest = torch.finfo(dtype).max
    # An output of zeros needs a scale above zero.
    scale = (wide.abs().amax(dim=1) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    return LinearWeight((wide / scale[:, None]).clamp(-largest, largest).to(dtype), scale)


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


def _quantized(weight: Tensor, dtype: torch.dtype) -> tuple[LinearWeight, _LayerReport]:
    quantized = to_float8(weight, dtype)
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
    error = float((x @ after.T - expected).norm()) / norm if norm else 0.0
    return quantized, _LayerReport(error, weight.numel() * weight.element_size(), size)


def _report(reports: list[_LayerReport]) -> KindReport:
    outputs = [report.output_error for report in reports]
    return KindReport(
        layers=len(reports),
        output_error_mean=sum(outputs) / len(reports),
        output_error_worst=max(outputs),
        before_bytes=sum(report.before_bytes for report in reports),
        after_bytes=sum(report.after_bytes for report in reports),
    )
