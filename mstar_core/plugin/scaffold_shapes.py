"""The shapes of a new plugin: which engine its first node has, and how many partitions follow. Read by `scaffold`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from string import Template
from typing import Final, Literal

Engine = Literal["kv", "stateless"]
ENGINES: Final[tuple[Engine, ...]] = ("stateless", "kv")
MOST_PARTITIONS: Final = 8

TO_CLIENT: Final = 'GraphEdge("$port", CLIENT, modality="text")'
TO_STREAM: Final = 'StreamingGraphEdge("$port", TO_TURN_$next)'

NODE: Final = """
TURN_$number = NodeSpec(
    name="turn_$number",
    engine=STATELESS,
    ports={"given": "i64", "text": "i64[n]"},
    batch_key=("given",),
    doc="moves letters on by one place in the alphabet",
)
TO_TURN_$number = Stream("to_turn_$number", into=(TURN_$number, "given"), chunk=FixedChunk(1)$accept)
"""

WALK: Final = (
    'turn_$number = Loop("turns_$number", GraphNode(TURN_$number, ("given",), ($edge,)), over=TO_TURN_$number)\n'
)

PROGRAM: Final = '''
def turner_$number(request: ProgramRequest) -> ProgramGenerator:
    """Take what comes until the stream ends."""
    yield Run("turn_$number")

'''

TURN_MODULE: Final = '''
class Turn(nn.Module):
    """Letters move on by one place in the alphabet, the last becomes the first; other bytes stay."""

    def forward(self, given: Tensor) -> dict[str, Tensor]:
        """given: int64 [batch, 1] or [batch, 1, n], one item of a stream. Gives text: int64 [batch, n]."""
        flat = given.flatten(1)
        turned = flat
        for first in (ord("A"), ord("a")):
            is_letter = (flat >= first) & (flat < first + 26)
            turned = torch.where(is_letter, (flat - first + 1) % 26 + first, turned)
        return {"text": turned}

'''

GRAPH_NAMES: Final[dict[Engine, tuple[str, ...]]] = {
    "stateless": ("CLIENT", "STATELESS", "GraphEdge", "GraphNode", "NodeSpec"),
    "kv": ("CLIENT", "KV_CACHE", "GraphEdge", "GraphNode", "KVSpec", "Loop", "NodeSpec", "Sampling", "StopOn"),
}
STAGE_NAMES: Final = ("STATELESS", "FixedChunk", "Loop", "Stream", "StreamingGraphEdge")
LINE: Final = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What was asked for. partitions: the first, and one more stage behind it for each further one."""

    engine: Engine = "stateless"
    partitions: int = 1

    def words(self) -> dict[str, str]:
        """What the template takes besides names."""
        numbers = range(2, self.partitions + 1)
        first = ("UPPER", "upper") if self.engine == "stateless" else ("LM", "LM")
        port = "text" if self.engine == "stateless" else "token"
        names = [first[1], *(f"turn_{n}" for n in numbers)]
        return {
            "graph_import": self._graph_import(),
            "first_edge": self._edge(port, 2),
            "stage_nodes": "".join(_filled(NODE, number=n, accept=self._accept(n)) for n in numbers),
            "stage_walks": "".join(_filled(WALK, number=n, edge=self._edge("text", n + 1)) for n in numbers),
            "stage_programs": "".join(_filled(PROGRAM, number=n) for n in numbers),
            "nodes": _items([first[0], *(f"TURN_{n}" for n in numbers)]),
            "streams": f"    streams=({_items(f'TO_TURN_{n}' for n in numbers)}),\n" if numbers else "",
            "partitions": self._partitions(),
            "node_names": ", ".join(names),
            "turn_module": TURN_MODULE if numbers else "",
            "stateless_choice": '(Upper() if node.name == "upper" else Turn())' if numbers else "Upper()",
            "kv_choice": 'self._lm() if node.name == "LM" else Turn().to(self.ctx.device)' if numbers else "self._lm()",
            "summary": self._summary(),
        }

    def _graph_import(self) -> str:
        chosen = {*GRAPH_NAMES[self.engine], *(STAGE_NAMES if self.partitions > 1 else ())}
        # Constants before classes, as the import sorter wants them.
        names = sorted(chosen, key=lambda name: (not name.isupper(), name))
        line = f"from mstar_core.graph import {', '.join(names)}"
        if len(line) <= LINE:
            return line
        return "from mstar_core.graph import (\n" + "".join(f"    {name},\n" for name in names) + ")"

    def _edge(self, port: str, following: int) -> str:
        if following > self.partitions:
            return _filled(TO_CLIENT, port=port)
        return _filled(TO_STREAM, port=port, next=following)

    def _accept(self, number: int) -> str:
        """Bytes alone go on from the language model, and not the id that ends the text."""
        return ", accept=range(END)" if self.engine == "kv" and number == 2 else ""

    def _partitions(self) -> str:
        walks = '{"capitals": capitals}' if self.engine == "stateless" else '{"prefill": prefill, "decode": decode}'
        first = f'Partition(name="main", program=program, walks={walks})'
        if self.partitions == 1:
            return f"{first},"
        lines = [first] + [
            f'Partition(name="turn_{n}", program=turner_{n}, walks={{"turn_{n}": turn_{n}}})'
            for n in range(2, self.partitions + 1)
        ]
        return "\n" + "".join(f"        {line},\n" for line in lines) + "    "

    def _summary(self) -> str:
        text = "the same text in capitals out" if self.engine == "stateless" else "noise of the same alphabet out"
        turned = (
            f", its letters moved on {self.partitions - 1} times by a stage of their own" if self.partitions > 1 else ""
        )
        return f"text in, {text}{turned}."


def _items(names: Iterable[str]) -> str:
    """What stands between the parentheses of a tuple."""
    listed = list(names)
    return ", ".join(listed) + ("," if len(listed) == 1 else "")


def _filled(text: str, **words: object) -> str:
    return Template(text).substitute(words)
