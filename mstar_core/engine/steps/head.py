"""Call of a module's head: logits from the outputs of a forward. Used by captured and uncaptured draws."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mstar_core.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.layers.kv_view import KVModule


def head_logits(module: KVModule, outputs: Mapping[str, Tensor], rows: Tensor | None = None) -> Tensor:
    """Return the logits of some rows of a forward's outputs, [n, vocab]. rows: int64 [n], None for all.

    Raises EngineError for an output that the module has left out.
    """
    wanted = ("hidden", *getattr(module, "head_ports", ()))
    missing = [port for port in wanted if port not in outputs]
    if missing:
        raise EngineError(
            f"forward of {type(module).__name__} returned no {missing[0]!r}",
            f"it returned {', '.join(outputs) or 'nothing'}",
            "return hidden states and every port of head_ports, one row per token",
        )
    hidden, *others = (outputs[port] if rows is None else outputs[port].index_select(0, rows) for port in wanted)
    return module.head(hidden, **dict(zip(wanted[1:], others, strict=True)))
