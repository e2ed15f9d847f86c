"""The generated parts of the docs: each gives Markdown made from the code that it describes. Read by docs.py."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def make_targets() -> str:
    """The Makefile's targets with their own words."""
    found = re.findall(r"^([a-z-]+):.*?## (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return table(("command", "does"), ((f"`make {name}`", text) for name, text in found))


def distributions() -> str:
    """Every distribution of this repository, with what it adds."""
    rows = [(f"`{each['name']}`", each["description"]) for each in projects()]
    return table(("distribution", "holds"), rows)


def extras() -> str:
    """The extras of the root distribution with what each brings."""
    extras = next(projects())["optional-dependencies"]
    names = {
        extra: ", ".join(f"`{re.split('[<>=!~ ]', line)[0]}`" for line in lines) for extra, lines in extras.items()
    }
    return table(("extra", "brings"), ((f"`mstarctl[{extra}]`", text) for extra, text in names.items()))


def config_keys() -> str:
    """Every key of a deployment file."""
    from mstar_core.config import SETTINGS

    rows = ((f"`{each.key}`", each.allowed, each.default_shown, each.doc) for each in SETTINGS)
    return table(("key", "type", "default", "meaning"), rows)


def plugin_hooks() -> str:
    """Every hook with its signature and its own words."""
    import inspect

    from mstar_core.plugin.hookspecs import HOOKS

    def section(hook: Callable[..., Any]) -> str:
        signature = f"{hook.__name__}{inspect.signature(hook)}".replace("'", "")
        return f"### {hook.__name__}\n\n```python\n{signature}\n```\n\n{inspect.getdoc(hook)}\n"

    return "\n".join(section(hook) for hook in HOOKS)


def projects() -> Iterator[dict[str, Any]]:
    """The `project` tables, the root first, then the plugins by name."""
    for path in (ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))):
        yield tomllib.loads(path.read_text(encoding="utf-8"))["project"]


def table(head: tuple[str, ...], rows: Any) -> str:
    """A Markdown table. A bar inside a cell is escaped."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


PARTS: dict[str, Callable[[], str]] = {
    "config-keys": config_keys,
    "distributions": distributions,
    "extras": extras,
    "make-targets": make_targets,
    "plugin-hooks": plugin_hooks,
}
