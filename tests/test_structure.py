"""Structure of the source tree: no import cycles, unique class names, folders of bounded size."""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MOST_MODULES = 20
ONE_FILE_PER_COMMAND = "mstarctl/commands"
DISTRIBUTIONS = {
    "mstar_core": ROOT / "mstar_core",
    "mstarctl": ROOT / "mstarctl",
    **{path.parent.name: path for path in sorted(ROOT.glob("plugins/*/src"))},
}


def modules_of(root: Path) -> dict[str, ast.Module]:
    """Parse every module of a distribution, by dotted name."""
    base = root if root.name == "src" else root.parent
    found = {}
    for path in sorted(root.rglob("*.py")):
        name = ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports_of(module: ast.Module, known: Mapping[str, object]) -> set[str]:
    """Modules of the same distribution that a module imports, under TYPE_CHECKING and in functions too."""
    found: set[str] = set()
    for node in ast.walk(module):
        match node:
            case ast.ImportFrom(module=str(source), level=0):
                for alias in node.names:
                    name = f"{source}.{alias.name}"
                    found.update(each for each in ([name] if name in known else [source]) if each in known)
            case ast.Import():
                found.update(alias.name for alias in node.names if alias.name in known)
    return found


def cycles(graph: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Strongly connected components of more than one module. Source: Tarjan, 1972."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in graph[name]:
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            start = stack.index(name)
            component = stack[start:]
            del stack[start:]
            if len(component) > 1:
                found.append(sorted(component))

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        for name in graph:
            if name not in index:
                visit(name)
    finally:
        sys.setrecursionlimit(limit)
    yield from found


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_no_module_imports_itself_through_others(distribution: str) -> None:
    modules = modules_of(DISTRIBUTIONS[distribution])
    graph = {name: imports_of(module, modules) - {name} for name, module in modules.items()}
    assert list(cycles(graph)) == []


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_class_names_are_unique(distribution: str) -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for name, module in modules_of(DISTRIBUTIONS[distribution]).items():
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_folders_hold_few_modules() -> None:
    counts: Counter[str] = Counter()
    for root in DISTRIBUTIONS.values():
        for path in root.rglob("*.py"):
            counts[str(path.parent.relative_to(ROOT))] += path.name != "__init__.py"
    large = {folder: count for folder, count in counts.items() if count > MOST_MODULES}
    assert set(large) <= {ONE_FILE_PER_COMMAND}, large


def test_a_cycle_is_found() -> None:
    assert list(cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == [["a", "b", "c"]]
    assert list(cycles({"a": {"b"}, "b": set()})) == []
