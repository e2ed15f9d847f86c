"""`mstarctl models`: lists, shows, draws and downloads the models of installed plugins."""

from __future__ import annotations

import enum
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from mstar_core.config.files.load import shipped, split_name
from mstar_core.graph import NodeSpec
from mstar_core.plugin import ModelSpec, param_specs
from mstarctl.complete import plugin_names
from mstarctl.output import Column, Printer, duration_text, size_text
from mstarctl.output.table import escape
from mstarctl.plugins import Plugins
from mstarctl.start.progress import STILL_S, bar

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="List, show and draw the models of the installed plugins.",
)

COLUMNS = (
    Column("NAME", "name"),
    Column("IN", "inputs"),
    Column("OUT", "outputs"),
    Column("NODES", "node_count", is_right=True),
    Column("WALKS", "walk_count", is_right=True),
    Column("CODE", "code"),
    Column("PLUGIN", "distribution"),
    Column("VERSION", "version"),
    Column("TITLE", "title", is_wide=True),
    Column("ALIASES", "aliases", is_wide=True),
    Column("ROUTES", "routes", is_wide=True),
    Column("CONFIGS", "configs", is_wide=True),
)


class Drawing(enum.StrEnum):
    """Formats of a drawn graph."""

    ASCII = "ascii"
    DOT = "dot"
    JSON = "json"


def list_problems(plugins: Plugins, printer: Printer) -> None:
    """Warn of plugins and models that a list leaves out."""
    for problem in plugins.problems():
        printer.warn(f"plugin {problem.plugin}: {problem.text}")
    for name, offers in plugins.clashes().items():
        printer.warn(f"model {name} is offered by several plugins: use {' or '.join(offers)}")


@app.command("ls")
def list_models(ctx: typer.Context) -> None:
    """List the models of installed plugins."""
    printer = Printer.of(ctx)
    plugins = Plugins.discover()
    list_problems(plugins, printer)
    items = [summary(spec, plugins) for spec in plugins.models()]
    printer.items("model", items, COLUMNS, empty="no models are installed; try: pip install mstar-orpheus")


def summary(spec: ModelSpec, plugins: Plugins) -> dict[str, Any]:
    """Return one model as `models ls` lists it."""
    entry = plugins.distribution_of(spec)
    return {
        "name": spec.name,
        "title": spec.title,
        "aliases": list(spec.aliases),
        "inputs": [modality.kind for modality in spec.inputs],
        "outputs": [modality.kind for modality in spec.outputs],
        "routes": sorted(spec.routes),
        "node_count": len(spec.nodes),
        "walk_count": sum(len(partition.walks) for partition in spec.partitions),
        "code": "installed" if spec.model and spec.processor else "not in this version",
        "has_tiny": spec.tiny is not None,
        "configs": sorted(shipped(spec)),
        "default_config": spec.default_config,
        "plugin": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
    }


@app.command("show")
def show_model(
    ctx: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="model, alias or dist/model", autocompletion=plugin_names)
    ],
) -> None:
    """Show one model: nodes, walks, streams, parameters, files."""
    describe_model(name, Printer.of(ctx))


def describe_model(name: str, printer: Printer) -> None:
    """Print one model. Raises NotFound with the nearest name."""
    from mstar_core.plugin.json_form import spec_to_json

    plugins = Plugins.discover()
    spec = plugins.model(name)
    facts = {**summary(spec, plugins), **spec_to_json(spec)}
    printer.item("model", facts, list(_text(spec, plugins)) if not printer.is_machine else "")


def _text(spec: ModelSpec, plugins: Plugins) -> Iterator[str]:
    facts = summary(spec, plugins)
    yield f"{spec.name}  {spec.title}  ({facts['distribution']} {facts['version']})"
    routes = ", ".join(facts["routes"]) or "native only"
    yield f"  inputs {', '.join(facts['inputs'])}; outputs {', '.join(facts['outputs'])}; routes {routes}"
    yield f"  model code: {facts['code']}; max_seq_len: {spec.max_seq_len}"
    if spec.aliases:
        yield f"  aliases {', '.join(spec.aliases)}"
    yield from (f"  {line}" for line in _miniatures(spec))
    yield "nodes"
    yield from (f"  {node.name:<22} {_node(node)}" for node in spec.nodes)
    for partition in spec.partitions:
        yield f"partition {partition.name}" + (f"  (runs if {partition.wants} is requested)" if partition.wants else "")
        yield f"  walks {', '.join(partition.walks)}"
    for stream in spec.streams:
        yield f"stream {stream.name}  into {stream.into[0].name}.{stream.into[1]}  {stream.chunk}"
    yield "parameters"
    for item in param_specs(spec.params):
        default = "required" if item.required else f"default {item.default}"
        yield f"  {item.name:<22} {item.doc}  ({item.range_text}, {default})"
    if spec.model_kwargs:
        yield "options (model_kwargs)"
        yield from (f"  {name:<22} {value}" for name, value in spec.model_kwargs.items())
    if facts["configs"]:
        yield f"configurations: {', '.join(facts['configs'])}; default {spec.default_config}"
    yield from (f"weights {name}: {ref.repo} ({ref.format})" for name, ref in spec.weights.items())


def _miniatures(spec: ModelSpec) -> Iterator[str]:
    """Yield one line for each checkpoint that needs no download."""
    for source, target in (("tiny", spec.tiny), ("mini", spec.mini)):
        if target is not None:
            yield spec.notice_of(source) or f"{spec.name}:{source} needs no download"


def _node(node: NodeSpec) -> str:
    words = [str(node.engine)]
    if node.kv is not None:
        words.append(f"{node.kv.layers} layers x {node.kv.kv_heads} KV heads x {node.kv.head_dim}")
    if node.tensor_parallel:
        words.append("tensor-parallel")
    if node.of is not None:
        words.append(f"branch {node.branch} of {node.of.name}")
    return "  ".join([*words, *([node.doc] if node.doc else [])])


@app.command("graph")
def draw_model(
    ctx: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="model, alias or dist/model", autocompletion=plugin_names)
    ],
    form: Annotated[Drawing, typer.Option("--format", help="format of the drawing")] = Drawing.ASCII,
    width: Annotated[int, typer.Option("--width", min=40, help="width of the drawing in columns")] = 100,
    is_ascii: Annotated[bool, typer.Option("--ascii", help="use no line-drawing characters")] = False,
) -> None:
    """Draw the walks of a model."""
    from mstarctl.graphs.dot import graph_to_dot
    from mstarctl.graphs.drawing import draw_graph
    from mstarctl.graphs.graph import Graph
    from mstarctl.graphs.published import graph_to_dict

    printer = Printer.of(ctx)
    spec = Plugins.discover().model(name)
    partitions = {partition.name: partition.walks for partition in spec.partitions}
    graph = Graph(name=spec.name, nodes=spec.nodes, streams=spec.streams, partitions=partitions)
    if form is Drawing.JSON or printer.is_machine:
        printer.data(graph_to_dict(graph), f"graph/{graph.name}")
    elif form is Drawing.DOT:
        printer.text(graph_to_dot(graph).rstrip("\n"))
    else:
        printer.text(draw_graph(graph, width=width, ascii_only=is_ascii).rstrip("\n"))


@app.command("fetch")
def fetch_model(
    ctx: typer.Context,
    name: Annotated[
        str,
        typer.Argument(metavar="MODEL[:tiny|:mini]", help="model, alias or dist/model", autocompletion=plugin_names),
    ],
    cache_dir: Annotated[
        Path | None, typer.Option("--cache-dir", metavar="DIR", help="where weights are cached and downloaded to")
    ] = None,
) -> None:
    """Download a model's weights, or resume a download; print the directory."""
    from mstarctl.start.fetch import fetch_weights

    printer = Printer.of(ctx)
    model, variant = split_name(name)
    spec = Plugins.discover().model(model)
    view = FetchView(printer)
    try:
        folder = fetch_weights(spec, variant=variant, cache_dir=cache_dir, show=view.show)
    finally:
        view.end()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    item = {"name": name, "folder": str(folder), "bytes": size}
    printer.say(f"{name}: {size_text(size)}")
    printer.item("weights", item, str(folder))


class FetchView:
    """Progress of a download: redrawn on a terminal, one line per file elsewhere."""

    def __init__(self, printer: Printer) -> None:
        self._printer = printer
        self._is_drawn = sys.stderr.isatty() and not printer.options.quiet
        self._file = ""
        self._begun = time.monotonic()
        self._first: int | None = None
        self._done, self._moved = -1, self._begun

    def show(self, done: int, total: int, file: str) -> None:
        """Show the bytes downloaded so far, of all files together."""
        if self._first is None:
            self._first = done
        if not self._is_drawn:
            if file != self._file:
                self._file = file
                self._printer.say(f"  {file}  {size_text(done)}/{size_text(total)}")
            return
        now = time.monotonic()
        if done != self._done:
            self._done, self._moved = done, now
        elapsed, still = now - self._begun, now - self._moved
        rate = (done - self._first) / max(1e-3, elapsed)
        left = f"  {duration_text((total - done) / rate)} left" if rate > 0 else ""
        share = bar(done / total if total else 0.0)
        if still >= STILL_S:
            left = f"  no data from the network for {duration_text(still)}"
        text = (
            f"  {share}  {size_text(done)}/{size_text(total)}  {size_text(rate)}/s{left}  {duration_text(elapsed)}"
            f"  {escape(file)}"
        )
        print(f"\r\x1b[2K{text[: shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)
        self._file = file

    def end(self) -> None:
        """End the progress line."""
        if self._is_drawn and self._file:
            print(file=sys.stderr, flush=True)
