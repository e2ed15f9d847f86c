"""Construction of modules whose parameters are all loaded afterwards. Used by plugins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from mstar_core.plugin.model import DeferredReads

HOST: Final = torch.device("cpu")


@contextlib.contextmanager
def building(device: torch.device, dtype: torch.dtype, deferred: DeferredReads | None = None) -> Iterator[None]:
    """Create parameters on `device`, in `dtype` by default, without initializing them.

    deferred: the weights are read later (`load_weights`): parameters are made in host memory that stays untouched.
    """
    device = device if deferred is None else HOST
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device, _SkipInit():
            yield
    finally:
        torch.set_default_dtype(before)


class _SkipInit(TorchFunctionMode):
    """Skips the random initialization of parameters."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"] if kwargs and "tensor" in kwargs else args[0]
        return func(*args, **(kwargs or {}))
