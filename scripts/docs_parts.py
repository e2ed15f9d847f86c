"""Generated parts of the docs: functions that return Markdown from the code they describe. Used by docs.py."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from docs_admin import ADMIN_PARTS
from docs_cli import cli_page
from docs_http import HTTP_PARTS
from docs_metrics import METRIC_FILES, METRIC_PARTS
from docs_plugins import PLUGIN_FILES
from docs_top import TOP_FILES, TOP_PARTS

ROOT = Path(__file__).resolve().parent.parent
SHOWN = (
    "ready_s",
    "mstarctl_help",
    "one_id_request",
    "one_id_request_added",
    "first_audio_streams_1",
    "first_audio_streams_8",
    "first_audio_streams_32",
    "realtime_factor_streams_1",
    "realtime_factor_streams_8",
    "worker_cpu_per_step_streams_32",
    "api_cpu_per_chunk_streams_32",
    "idle_cpu",
)
"""Figures on the performance page, a selection from the file."""


def make_targets() -> str:
    """Return the table of the Makefile's targets with their help texts."""
    found = re.findall(r"^([a-z-]+):.*?## (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return table(("command", "does"), ((f"`make {name}`", text) for name, text in found))


def distributions() -> str:
    """Return the table of the distributions of this repository."""
    rows = [(f"`{each['name']}`", each["description"]) for each in projects()]
    return table(("distribution", "holds"), rows)


def extras() -> str:
    """Return the table of the root distribution's extras and their packages."""
    extras = next(projects())["optional-dependencies"]
    names = {
        extra: ", ".join(f"`{re.split('[<>=!~ ]', line)[0]}`" for line in lines) for extra, lines in extras.items()
    }
    return table(("extra", "brings"), ((f"`mstarctl[{extra}]`", text) for extra, text in names.items()))


def config_keys() -> str:
    """Return the table of the keys of a deployment file."""
    from mstar_core.config.schema import SETTINGS
    from mstarctl.authoring.config_schema import default_shown

    rows = ((f"`{each.key}`", each.allowed, default_shown(each), each.doc) for each in SETTINGS)
    return table(("key", "type", "default", "meaning"), rows)


def serve_keys() -> str:
    """Return the table of the keys of a serve.yaml."""
    from dataclasses import replace

    from mstar_core.config.key import settings_of
    from mstar_core.gateway.serve_file import TABLES, WORDS, ServeFile
    from mstarctl.authoring.config_schema import default_shown

    def word(key: str) -> str:
        return ".".join(WORDS.get(part, part) for part in key.split("."))

    sections = [("", ServeFile), *((f"{table}.NAME.", record) for table, record in TABLES.items())]
    found = [
        replace(each, key=f"{prefix}{word(each.key)}") for prefix, record in sections for each in settings_of(record)
    ]
    rows = ((f"`{each.key}`", each.allowed, default_shown(each), each.doc) for each in found)
    return table(("key", "type", "default", "meaning"), rows)


def plugin_hooks() -> str:
    """Return every hook with its signature and docstring."""
    import inspect

    from mstar_core.plugin.hookspecs import HOOKS

    def section(hook: Callable[..., Any]) -> str:
        signature = f"{hook.__name__}{inspect.signature(hook)}".replace("'", "")
        return f"### {hook.__name__}\n\n```python\n{signature}\n```\n\n{inspect.getdoc(hook)}\n"

    return "\n".join(section(hook) for hook in HOOKS)


def exit_codes() -> str:
    """Return the table of exit codes with names and meanings."""
    from mstar_core.errors import ExitCode
    from mstarctl.commands.help import MEANINGS

    rows = ((f"`{int(code)}`", f"`{code.name.lower()}`", MEANINGS[code]) for code in ExitCode)
    return table(("exit", "name", "meaning"), rows)


def error_tree() -> str:
    """Return the tree of errors as its module draws it, and each class's status and exit code."""
    from mstar_core import errors

    drawing = (errors.__doc__ or "").partition("\n\n")[2].strip()
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.MstarError)]
    rows = ((f"`{kind.__name__}`", f"`{kind.code}`", str(kind.status), str(int(kind.exit_code))) for kind in classes)
    return f"```\n{drawing}\n```\n\n" + table(("class", "code", "HTTP status", "exit"), rows)


def wire_messages() -> str:
    """Return the table of wire messages: tag, module of the link, sender, receiver, first sentence of the docstring."""
    from typing import get_args

    from mstar_core.messages.wire import Message

    def row(kind: type[Any]) -> tuple[str, ...]:
        link = kind.__module__.rpartition(".")[2]
        words = " ".join((kind.__doc__ or "").split())
        found = re.match(r"(?P<sender>.+?) to (?:the )?(?P<reader>[\w ]+?)[:.,] ?(?P<says>.*)", words)
        if found is None:
            raise ValueError(f"{kind.__name__}: its docstring does not begin with who sends it to whom")
        says = found["says"].partition(". ")[0].rstrip(".")
        return f"`{kind.__struct_config__.tag}`", f"`{link}`", found["sender"].lower(), found["reader"].lower(), says

    return table(("type", "link", "from", "to", "says"), (row(kind) for kind in get_args(Message)))


def wire_schema() -> str:
    """Return the content of docs/wire/schema.json: the JSON schema (2020-12) of an envelope and of every message.

    MessagePack follows it one to one. Byte strings are MessagePack `bin`, shown as strings with `contentEncoding`. The
    field `type` is the tag of a union.
    """
    import msgspec

    from mstar_core.messages.wire import WIRE_VERSION, Envelope

    (root,), components = msgspec.json.schema_components([Envelope], ref_template="#/$defs/{name}")
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mstarctl wire format",
        "version": WIRE_VERSION,
        **root,
        "$defs": dict(sorted(components.items())),
    }
    return json.dumps(schema, indent=1) + "\n"


def figures() -> str:
    """Return the table of selected figures in the newest file under bench/results/, with its conditions."""
    found = (ROOT / "bench" / "results").glob("*.json")
    stored = sorted(path for path in found if not path.name.endswith(".samples.json"))  # names begin with the time
    if not stored:
        return "No file of figures is stored yet."
    run = json.loads(stored[-1].read_text(encoding="utf-8"))
    env = ", ".join(
        f"{name} {run['env'][name]}" for name in ("cpu", "cores", "gpu", "python", "torch") if name in run["env"]
    )
    source = f"`{stored[-1].name}`: {run['when']}, commit {run['commit']}, {run['model']}; {env}"
    head = f"{source}. Made by `{run['command']}`."
    columns = ("p50", "min", "max", "n", "unit")
    chosen = {name: run["metrics"][name] for name in SHOWN if name in run["metrics"]}
    rows = ((name, *(_cell(each.get(key)) for key in columns)) for name, each in chosen.items())
    return head + "\n\n" + table(("figure", *columns), rows)


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case int() | float():
            return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
        case _:
            return str(value)


def projects() -> Iterator[dict[str, Any]]:
    """Return the `project` tables, the root first, then the plugins by name."""
    for path in (ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))):
        yield tomllib.loads(path.read_text(encoding="utf-8"))["project"]


def table(head: tuple[str, ...], rows: Any) -> str:
    """Return a Markdown table. Bars in cells are escaped."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def bench_metrics() -> str:
    """Return the metrics of load tests as a table."""
    from mstarctl.bench.measure.load_metrics import METRICS

    rows = [f"| `{each.name}` | {each.unit} | {each.kind or 'all'} | {each.definition} |" for each in METRICS]
    return "\n".join(["| metric | unit | modality | definition |", "|---|---|---|---|", *rows])


def chat_commands() -> str:
    """Return the commands and keys of `mstarctl chat` as a table."""
    from mstarctl.chat.commands import COMMANDS, KEYS

    named = [(f"`{f'{each.name} {each.argument}'.rstrip()}`", each.help) for each in COMMANDS]
    return table(("command", "does"), [*named, *((f"`{keys}`", what) for keys, what in KEYS)])


PARTS: dict[str, Callable[[], str]] = {
    **ADMIN_PARTS,
    **METRIC_PARTS,
    "bench-metrics": bench_metrics,
    "chat-commands": chat_commands,
    "cli": cli_page,
    "config-keys": config_keys,
    "distributions": distributions,
    "error-tree": error_tree,
    "exit-codes": exit_codes,
    "extras": extras,
    "figures": figures,
    **HTTP_PARTS,
    "make-targets": make_targets,
    "plugin-hooks": plugin_hooks,
    "serve-keys": serve_keys,
    **TOP_PARTS,
    "wire-messages": wire_messages,
}

FILES: dict[str, Callable[[], str]] = {
    **METRIC_FILES,
    **PLUGIN_FILES,
    **TOP_FILES,
    "docs/wire/schema.json": wire_schema,
}
"""Files that are generated whole, by path."""
