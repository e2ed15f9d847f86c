"""Plans that the leader of a tensor-parallel group sends to its followers, before it executes the same plans itself.

A step plan travels as it is: arrays and host tensors by their bytes, device tensors by broadcasts behind the frame.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from mstar_core.engine.cuda_graphs.kinds import StepKind
from mstar_core.engine.steps.masks import Masks
from mstar_core.engine.steps.plan import StepPlan


class Step(msgspec.Struct, frozen=True, tag="step", kw_only=True):
    """A step of a node. plan: without page tables, and with the version alone of a decode batch that was sent before.

    tables: rows of the page tables that have changed since, int32, by slot.
    """

    node: str
    plan: StepPlan
    tables: dict[int, bytes] = {}


class Capture(msgspec.Struct, frozen=True, tag="capture", kw_only=True):
    """A step to capture."""

    node: str
    kind: StepKind
    size: tuple[int, ...]


class Dropped(msgspec.Struct, frozen=True, tag="dropped", kw_only=True):
    """A capture that failed at the leader, so that the bucket does not exist."""

    node: str
    kind: StepKind
    size: tuple[int, ...]


class Compare(msgspec.Struct, frozen=True, tag="compare", kw_only=True):
    """Request for a checksum of the last ids, which the follower answers by `Checksum`."""

    node: str
    number: int


class StopPlans(msgspec.Struct, frozen=True, tag="stop", kw_only=True):
    """The end of the group."""

    reason: str = ""


class Forward(msgspec.Struct, frozen=True, tag="forward", kw_only=True):
    """A forward of a stateless node. tensors, arrays: values of its ports. listed: ports that take a list of them."""

    node: str
    tensors: dict[str, list[Tensor]] = {}
    arrays: dict[str, list[np.ndarray]] = {}
    listed: list[str] = []


Plan = Step | Forward | Capture | Dropped | Compare | StopPlans


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """Plans in order. sequence: number of the frame, from 1."""

    sequence: int
    plans: list[Plan]


class Checksum(msgspec.Struct, frozen=True, array_like=True):
    """A follower's answer to `Compare`. index: its place in the group."""

    index: int
    node: str
    number: int
    value: int


class FrameEncoder:
    """Encodes frames. shared: device tensors of the last frame, in the order of their broadcasts."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encoded)
        self.shared: list[Tensor] = []

    def encode(self, frame: Frame) -> bytes:
        """Encode a frame."""
        self.shared = []
        return self._encoder.encode(frame)

    def _encoded(self, value: object) -> object:
        match value:
            case np.ndarray():
                return value.dtype.str, value.shape, value.tobytes()
            case Masks():
                return self._encoded(value.bits)
            case torch.dtype():
                return _name(value)
            case Tensor():
                data = None
                if value.is_cpu:
                    data = bytes(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                else:
                    self.shared.append(value)
                return _name(value.dtype), tuple(value.shape), data
        raise TypeError(f"plans do not hold {type(value).__name__}")


class FrameDecoder:
    """Decodes frames. shared: device tensors of the last frame, uninitialized, in the order of their broadcasts."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(Frame, dec_hook=self._decoded)
        self.shared: list[Tensor] = []

    def decode(self, data: bytes) -> Frame:
        """Decode a frame."""
        self.shared = []
        return self._decoder.decode(data)

    def _decoded(self, kind: type, value: Any) -> object:
        if kind is torch.dtype:
            return getattr(torch, value)
        dtype, shape, data = value
        if kind in (np.ndarray, Masks):
            array = np.frombuffer(bytearray(data), dtype=np.dtype(dtype)).reshape(shape)
            return array if kind is np.ndarray else Masks(lambda: array)
        if data is None:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
            self.shared.append(tensor)
            return tensor
        if not data:
            return torch.empty(shape, dtype=getattr(torch, dtype))
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(getattr(torch, dtype)).view(shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
