"""Scaffold of a new plugin, written from the template. Used by `mstarctl plugins new`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from string import Template
from typing import Final, Literal

from mstar_core.errors import ConfigError, UsageError, did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of models. folders: of its templates beside the common ones. output: modality of its sample request.

    weights: what its official checkpoint is, for the README.
    """

    folders: tuple[str, ...]
    summary: str
    nodes: str
    output: str
    sample_title: str
    weights: str


OWN: Final = "The weights are in a layout of this package: set `REPO` in `config.py` once they are published."
KINDS: Final[Mapping[str, Kind]] = {
    "llm": Kind(
        folders=("checkpoint", "llm"),
        summary="a language model in the layout of Llama, text in, text out.",
        nodes="LM",
        output="text",
        sample_title="a text to a text",
        weights="`REPO` in `config.py` names SmolLM2 135M, which `mstarctl up $model` downloads.",
    ),
    "encdec": Kind(
        folders=("checkpoint", "encdec"),
        summary="an encoder-decoder in the layout of BART, text in, text out.",
        nodes="encoder, decoder",
        output="text",
        sample_title="a text to a text",
        weights="`REPO` in `config.py` names BART base, which `mstarctl up $model` downloads.",
    ),
    "audio-in": Kind(
        folders=("checkpoint", "audio-in"),
        summary="an audio encoder in the layout of Whisper before a Llama, sound and text in, text out.",
        nodes="audio_encoder, LM",
        output="text",
        sample_title="a sound to a text",
        weights=OWN,
    ),
    "tts-codec": Kind(
        folders=("checkpoint", "tts-codec"),
        summary="a Llama that writes codes and a codec that turns them into sound while it writes.",
        nodes="LM, codec",
        output="audio",
        sample_title="a text to speech",
        weights=OWN,
    ),
    "diffusion": Kind(
        folders=("checkpoint", "diffusion"),
        summary="a flow over latents that attends to a text, text in, pictures out.",
        nodes="text_encoder, noise, denoiser, decoder",
        output="image",
        sample_title="a text to a picture",
        weights=OWN,
    ),
    "encoder": Kind(
        folders=("checkpoint", "encoder"),
        summary="an encoder in the layout of RoBERTa, a text to one vector.",
        nodes="encoder",
        output="embedding",
        sample_title="a text to a vector",
        weights="`REPO` in `config.py` names a sentence encoder, which `mstarctl up $model` downloads.",
    ),
}
"""Kinds of models by the name of the shape."""

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
            "more": "",
        }

    @property
    def folders(self) -> tuple[str, ...]:
        """Folders of the templates beside the common ones."""
        return ("toy", self.engine)

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


def write_plugin(
    name: str, folder: Path, *, engine: str = ENGINES[0], partitions: int = 1, kind: str = ""
) -> tuple[Path, ...]:
    """Write the distribution `name` into `folder` and return the files written.

    kind: of models, a key of KINDS. Without it a toy is written: engine is that of its first node, `stateless` or `kv`,
    and partitions their number, joined by streams.
    Raises UsageError for an invalid name or shape or a folder that is not empty, ConfigError if writing fails.
    """
    words = template_words(name)
    if kind and (engine, partitions) != (ENGINES[0], 1):
        raise UsageError("--shape has nodes of its own", hint="leave out --engine and --partitions")
    if kind:
        folders, more = kind_of(kind).folders, kind_words(kind, words)
    else:
        shape = shape_of(engine, partitions)
        folders, more = shape.folders, shape.words()
    words = {**words, **more}
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty", hint="name a new folder")
    written = []
    try:
        for source, part in template_files(("common", *folders)).items():
            relative = source.removesuffix(SUFFIX).replace("package_", words["package"])
            target = folder / relative.replace("model_", words["model"])
            target.parent.mkdir(parents=True, exist_ok=True)
            text = Template((TEMPLATE / part / source).read_text(encoding="utf-8")).substitute(words)
            target.write_text(sorted_imports(text) if target.suffix == ".py" else text, encoding="utf-8")
            written.append(target)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written", error.strerror or str(error), file=str(folder), key=""
        ) from error
    return tuple(written)


def template_files(folders: Sequence[str]) -> dict[str, str]:
    """Return the folder of each template file, by its path within. A file of a later folder replaces an earlier one."""
    found: dict[str, str] = {}
    for folder in folders:
        home = TEMPLATE / folder
        found |= {str(path.relative_to(home)): folder for path in sorted(home.rglob(f"*{SUFFIX}"))}
    return found


def kind_of(name: str) -> Kind:
    """Return a kind of models. Raises UsageError with the choices."""
    if name not in KINDS:
        raise UsageError(f"there is no shape {name!r}", hint=did_you_mean(name, KINDS))
    return KINDS[name]


def kind_words(name: str, words: Mapping[str, str]) -> dict[str, str]:
    """Return the template variables of a kind."""
    kind = kind_of(name)
    files = (
        ("config", "sizes and ids of a checkpoint"),
        ("nodes", "modules of the nodes and the names of their weights"),
    )
    rows = [f"| `src/{words['package']}/{file}.py` | | {what} |" for file, what in files]
    checks = "`reference.py` computes the same answers in another way; the gold checks compare them."
    more = "\n".join([*rows, "", _filled(kind.weights, **words), "", checks, ""])
    return {
        "summary": kind.summary,
        "node_names": kind.nodes,
        "output": kind.output,
        "sample_title": kind.sample_title,
        "more": more,
    }


_IMPORT: Final = re.compile(r"^ *from \S+ import (?:\([^)]*\)|[^(\n]*)\n", re.MULTILINE)


def sorted_imports(text: str) -> str:
    """Return a module whose adjacent `from` imports are sorted by module: their order depends on the package's name."""
    found = list(_IMPORT.finditer(text))
    blocks: list[list[re.Match[str]]] = []
    for statement in found:
        if blocks and blocks[-1][-1].end() == statement.start():
            blocks[-1].append(statement)
        else:
            blocks.append([statement])
    for block in reversed(blocks):
        ordered = sorted((each[0] for each in block), key=lambda each: each.split()[1])
        text = text[: block[0].start()] + "".join(ordered) + text[block[-1].end() :]
    return text


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
