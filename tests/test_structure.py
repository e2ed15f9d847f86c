"""Structure of the source tree: no import cycles of modules or folders, unique class names, folders of bounded size."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MOST_MODULES = 15
ONE_FILE_PER_COMMAND = "mstarctl/commands"
UNSOLVED: set[tuple[str, str]] = set()
"""Imports between folders that close a cycle today: (importer, imported). An entry goes with its cycle."""

DISTRIBUTIONS = {
    "mstar_core": ROOT / "mstar_core",
    "mstarctl": ROOT / "mstarctl",
    **{path.parent.name: path for path in sorted(ROOT.glob("plugins/*/src"))},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """Facts of a module: its imports from its own distribution, and the classes that it defines."""

    imports: frozenset[str]
    classes: tuple[str, ...]


@cache  # parsing takes seconds, and several tests read the same facts
def modules_of(distribution: str) -> dict[str, Module]:
    """Read every module of a distribution, by dotted name."""
    root = DISTRIBUTIONS[distribution]
    base = root if root.name == "src" else root.parent
    paths = {
        ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(root.rglob("*.py"))
    }
    return {name: read(path.read_text(encoding="utf-8"), paths) for name, path in paths.items()}


def read(source: str, known: Mapping[str, object]) -> Module:
    """Read the facts of a module from its source."""
    module = ast.parse(source)
    classes = tuple(node.name for node in module.body if isinstance(node, ast.ClassDef))
    return Module(imports=frozenset(imports_of(module, known)), classes=classes)


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
    graph = {name: {*module.imports} - {name} for name, module in modules_of(distribution).items()}
    assert list(cycles(graph)) == []


def folders_of(modules: Iterable[str]) -> dict[str, str]:
    """Return the folder of each module; a module beside subfolders is a folder of its own."""
    packages = {name.rpartition(".")[0] for name in modules}
    split = {name.rpartition(".")[0] for name in packages}
    homes = {name: name if name in packages else name.rpartition(".")[0] for name in modules}
    return {name: name if home in split else home for name, home in homes.items()}


def folder_cycles(modules: Mapping[str, Module], ignored: Collection[tuple[str, str]] = ()) -> list[str]:
    """Describe each import cycle between folders by the imports that close it."""
    folders = folders_of(modules)
    edges: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, module in modules.items():
        for target in module.imports:
            pair = folders[name], folders[target]
            if pair[0] != pair[1] and pair not in ignored:
                edges[pair[0]][pair[1]].append(f"{name} imports {target}")
    graph = {folder: set(edges[folder]) for folder in folders.values()}
    return [
        "\n".join(line for source in cycle for target in cycle for line in edges[source].get(target, ()))
        for cycle in cycles(graph)
    ]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_no_folder_imports_itself_through_others(distribution: str) -> None:
    found = folder_cycles(modules_of(distribution), UNSOLVED)
    assert not found, "cycles of folders:\n\n" + "\n\n".join(found)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_class_names_are_unique(distribution: str) -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for name, module in modules_of(distribution).items():
        for each in module.classes:
            places[each].append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_folders_hold_few_modules() -> None:
    counts: Counter[str] = Counter()
    for root in DISTRIBUTIONS.values():
        for path in root.rglob("*.py"):
            counts[str(path.parent.relative_to(ROOT))] += path.name != "__init__.py"
    large = {folder: count for folder, count in counts.items() if count > MOST_MODULES}
    assert set(large) <= {ONE_FILE_PER_COMMAND}, large


def test_the_contract_of_mstarctl_names_what_it_lets_through() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    contract = next(each for each in contracts if each["name"].startswith("mstarctl imports only"))
    parts = {path.stem for path in (ROOT / "mstar_core").iterdir() if path.is_dir() or path.suffix == ".py"}
    forbidden = {name.removeprefix("mstar_core.") for name in contract["forbidden_modules"]}
    *names, last = contract["name"].removeprefix("mstarctl imports only ").removesuffix(" of the core").split(", ")
    assert {*names, *last.split(" and ")} == parts - forbidden - {"__init__", "__pycache__"}


def test_a_cycle_is_found() -> None:
    assert list(cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == [["a", "b", "c"]]
    assert list(cycles({"a": {"b"}, "b": set()})) == []


def test_a_cycle_of_folders_is_described_by_its_imports() -> None:
    """The files of `a` and `b` form no cycle, only the folders do. `c.one` and `c.two` stand beside a subfolder."""
    sources = {
        "p": "",
        "p.a": "",
        "p.a.one": "from p.b import two",
        "p.a.two": "",
        "p.b": "",
        "p.b.one": "if TYPE_CHECKING:\n    from p.a.two import Thing",
        "p.b.two": "",
        "p.c": "",
        "p.c.one": "import p.c.d.one",
        "p.c.two": "",
        "p.c.d": "",
        "p.c.d.one": "from p.c.two import thing",
    }
    modules = {name: read(source, sources) for name, source in sources.items()}
    assert folder_cycles(modules) == ["p.a.one imports p.b.two\np.b.one imports p.a.two"]
    assert folder_cycles(modules, {("p.b", "p.a")}) == []
