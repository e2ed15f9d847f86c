"""Deals the inputs of a job among its rows: one value for all, or one for each. Used by both engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mstar_core.errors import EngineError
from mstar_core.graph.spec.nodes import PortType

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.graph.spec.nodes import NodeSpec


class Dealer:
    """Knows the declared ranks of one node's ports. Owned by its engine.

    A value of the declared rank is every row's; with one dimension more in front, of as many entries as there are
    rows, each row gets its own. Numbers (0-d) are every row's whatever is declared. A port that declares no shape says
    nothing of its rank: there a first dimension of that many entries is dealt.
    """

    def __init__(self, spec: NodeSpec) -> None:
        self._node = spec.name
        self._rank: dict[str, int] = {}
        for name, text in spec.ports.items():
            shape = PortType.parse(text).shape
            if shape:
                self._rank[name] = len(shape)

    def is_dealt(self, name: str, value: Tensor, rows: int) -> bool:
        """Whether each row gets a value of its own. Raises EngineError for one that fits neither way."""
        rank = self._rank.get(name)
        if not value.dim() or value.dim() == rank:
            return False
        if rank in (None, value.dim() - 1) and value.shape[0] == rows:
            return True
        raise EngineError(
            f"port {name!r} of node {self._node} does not hold one value per row",
            f"{rows} rows, shape {list(value.shape)}" + ("" if rank is None else f", {rank} dimensions without rows"),
            "give one value for all rows, or one for each on a first axis",
            node=self._node,
        )

    def deal(self, inputs: Mapping[str, Tensor], rows: int) -> list[dict[str, Tensor]]:
        """Each row's inputs. Raises EngineError as `is_dealt` does."""
        dealt = {name: value.unbind(0) for name, value in inputs.items() if self.is_dealt(name, value, rows)}
        return [{name: dealt[name][row] if name in dealt else value for name, value in inputs.items()}
                for row in range(rows)]  # fmt: skip
