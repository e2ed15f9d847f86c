"""Scaffold of a new plugin, written from the template. Used by `mstarctl plugins new`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from string import Template
from typing import Final, Literal

from mstar_core.errors import ConfigError, UsageError, did_you_mean

Engine = Literal["kv", "stateless"]
ENGINES: Final[tuple[Engine, ...]] = ("stateless", "kv")
MOST_PARTITIONS: Final = 8

TO_CLIENT: Final = 'GraphEdge("$port", CLIENT, modality="text")'
TO_STREAM: Final = 'StreamingGraphEdge("$port", TO_TURN_$next)'

NODE: Final = """
TURN_$number = NodeSpec(
    name="turn_$number",
    engine=STATELESS,
    ports={"item": "i64", "text": "i64[n]"},
    batch_key=("item",),
    doc="moves letters on by one place in the alphabet",
)
TO_TURN_$number = Stream("to_turn_$number", into=(TURN_$number, "item"), chunk=FixedChunk(1)$accept)
"""

WALK: Final = (
    'turn_$number = Loop("turns_$number", GraphNode(TURN_$number, ("item",), ($edge,)), over=TO_TURN_$number)\n'
)

PROGRAM: Final = '''
def turner_$number(request: ProgramRequest) -> ProgramGenerator:
    """Run the walk until its stream ends."""
    yield Run("turn_$number")

'''

TURN_MODULE: Final = '''
class Turn(nn.Module):
    """Letters move on by one place in the alphabet, the last becomes the first; other bytes stay."""

    def forward(self, item: Tensor) -> dict[str, Tensor]:
        """item: int64 [batch, 1] or [batch, 1, n], one item of a stream. Gives text: int64 [batch, n]."""
        flat = item.flatten(1)
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
    """Shape of a new plugin. partitions: the first one, and one further stage for each more."""

    engine: Engine = "stateless"
    partitions: int = 1

    def words(self) -> dict[str, str]:
        """Return the template variables besides names."""
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
        """Return the filter of the language model's stream: byte ids pass, the end id does not."""
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
    """Format the items of a tuple literal."""
    listed = list(names)
    return ", ".join(listed) + ("," if len(listed) == 1 else "")


def _filled(text: str, **words: object) -> str:
    return Template(text).substitute(words)


TEMPLATE: Final = Path(__file__).parent / "template"
SUFFIX: Final = ".tmpl"
_NAME: Final = re.compile(r"^[a-z][a-z0-9]*(-[a-z0-9]+)+$")
_TAKEN: Final = frozenset({"mstar", "mstarctl", "mstar-core"})


def write_plugin(name: str, folder: Path, *, engine: str = ENGINES[0], partitions: int = 1) -> tuple[Path, ...]:
    """Write the distribution `name` into `folder` and return the files written.

    engine: of the first node, `stateless` or `kv`. partitions: number of partitions, joined by streams.
    Raises UsageError for an invalid name or shape or a folder that is not empty, ConfigError if writing fails.
    """
    shape = shape_of(engine, partitions)
    words = {**template_words(name), **shape.words()}
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty", hint="name a new folder")
    written = []
    try:
        for source in sorted(TEMPLATE.rglob(f"*{SUFFIX}")):
            part, *rest = source.relative_to(TEMPLATE).parts
            if part not in ("common", shape.engine):
                continue
            relative = "/".join(rest).removesuffix(SUFFIX).replace("package_", words["package"])
            target = folder / relative.replace("model_", words["model"])
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(Template(source.read_text(encoding="utf-8")).substitute(words), encoding="utf-8")
            written.append(target)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written", error.strerror or str(error), file=str(folder), key=""
        ) from error
    return tuple(written)


def shape_of(engine: str, partitions: int) -> Shape:
    """Return the shape of a new plugin. Raises UsageError with the choices."""
    known = next((name for name in ENGINES if name == engine), None)
    if known is None:
        raise UsageError(f"there is no engine {engine!r}", hint=did_you_mean(engine, ENGINES))
    if not 1 <= partitions <= MOST_PARTITIONS:
        raise UsageError(f"partitions is {partitions}", hint=f"1 to {MOST_PARTITIONS}")
    return Shape(engine=known, partitions=partitions)


def template_words(name: str) -> dict[str, str]:
    """Return the template variables of a name. Raises UsageError for an invalid distribution name."""
    if name in _TAKEN:
        raise UsageError(f"the name {name!r} is taken by another distribution", hint="choose a name such as mstar-foo")
    if not _NAME.match(name):
        raise UsageError(f"{name!r} is not a valid name", hint="use lower case words joined by -, such as mstar-foo")
    model = name.removeprefix("mstar-").replace("-", "_")
    major, minor = _own_version()
    words = {
        "distribution": name,
        "package": name.replace("-", "_"),
        "model": model,
        "title": model.replace("_", " ").capitalize(),
    }
    return {
        **words,
        "class_name": "".join(part.capitalize() for part in model.split("_")),
        "pin": f">={major}.{minor},<{major}.{minor + 1}",
    }


def _own_version() -> tuple[int, int]:
    try:
        major, minor, *_ = metadata.version("mstarctl").split(".")
    except metadata.PackageNotFoundError:
        return 0, 1
    return int(major), int(minor)
