"""Docs: every path, module, class and function in backticks exists in the code."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("plugins/*/README.md")))
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")

SUFFIXES = "py|md|toml|yaml|json|js|css|html|sh|c|cu|lock|txt|svg|png"
FILE = re.compile(rf"[\w.-]+(?:/[\w.-]+)*\.(?:{SUFFIXES})")
FOLDER = re.compile(
    r"(?:mstar_core|mstarctl|plugins|tests|docs|scripts|bench|configs|examples|deploy)(?:/[\w.-]+)+/?|[a-z_]+/"
)
MODULE = re.compile(r"(?:mstar_core|mstarctl|mstar_\w+)(?:\.\w+)+")
CLASS = re.compile(r"([A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*)(?:\(.*\))?")
MEMBER = re.compile(r"([A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*)\.(\w+)(?:\(.*\))?")
CALL = re.compile(r"(?:[\w.]+\.)?([a-z_]\w*)\([^()]*\)")
TEST = re.compile(r"([\w/.-]+\.py)::(\w+)")

NOT_OURS = frozenset(
    span
    for spans in (
        # Python's built-ins, and exceptions of the OpenAI and requests clients
        ("ConnectionError", "HTTPError", "None", "OSError", "ReadTimeout", "TypeError", "ValueError", "len()"),
        # HTTP, systemd and ssh
        ("Origin", "TimeoutStopSec", "ControlMaster", "SetEnv"),
        # kinds of KubeRay, and a file without an ending
        ("RayCluster", "RayJob", "RayService", "Containerfile"),
        # keys of the keyboard
        ("Home", "PgDn", "PgUp"),
        # files that commands write, and files of published checkpoints
        ("curve.json", "env.json", "outcome.json", "result.json", "spec.json", "sweep.json"),
        ("plan.actions.json", "plan.best_energy.json", "roll.energies-2.json"),
        ("assets/ID/norm_stats.json", "modules.json", "policy_postprocessor.json", "policy_preprocessor.json"),
        # a heading of the changelogs
        ("Unreleased",),
    )
    for span in spans
)
"""Spans that look like ours and are not. All others must exist."""


@dataclass(slots=True)
class Index:
    """Names that the tracked files define."""

    files: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    members: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Attributes and methods by class, those of its bases excluded."""
    bases: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    functions: set[str] = field(default_factory=set)
    globals: set[str] = field(default_factory=set)
    """Variables and classes of modules."""

    def members_of(self, name: str) -> set[str]:
        """Attributes and methods of a class and of its bases."""
        return self.members[name].union(*(self.members_of(base) for base in self.bases[name]))


@cache
def index() -> Index:
    """Index the Python and JavaScript files of all distributions, scripts, examples and tests."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = Index(files=set(listed.splitlines()))
    for path in names.files:
        if path.endswith(".py"):
            names.modules.add(module_of(path))
        if path.endswith(".py") and "tests/" not in path:
            index_python(names, module_of(path), ast.parse((ROOT / path).read_text(encoding="utf-8")))
        elif path.endswith(".js"):
            text = (ROOT / path).read_text(encoding="utf-8")
            names.functions.update(re.findall(r"\bfunction\*? (\w+)\(", text))
    return names


def module_of(path: str) -> str:
    """Return the dotted name of a tracked Python file."""
    _, _, inside = path.rpartition("/src/")
    return inside.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def index_python(names: Index, module: str, tree: ast.Module) -> None:
    """Add the definitions of one module."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                names.functions.add(node.name)
            case ast.ClassDef():
                names.globals.add(node.name)
                names.members[node.name].update(attributes(node))
                names.bases[node.name].update(name_of(base) for base in node.bases)
    for statement in tree.body:
        names.modules.update(f"{module}.{name}" for name in defined(statement))
        names.globals.update(defined(statement))


def defined(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement of a module or class body binds."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.Assign(targets=targets):
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def attributes(node: ast.ClassDef) -> Iterator[str]:
    """Methods and fields of a class, and attributes that its methods assign on self."""
    for statement in node.body:
        yield from defined(statement)
    for inner in ast.walk(node):
        match inner:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def name_of(base: ast.expr) -> str:
    """Return the last name of a base class's expression."""
    match base:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value):
            return name_of(value)
    return ""


def spans(page: Path) -> Iterator[str]:
    """Code spans of a page outside its fenced blocks."""
    yield from SPAN.findall(FENCE.sub("", page.read_text(encoding="utf-8")))


def is_known(span: str) -> bool:
    """Whether a span names nothing of ours, or something that exists.

    A path may be relative to the repository, to the page, or to a package: any end of a tracked path will do.
    """
    names = index()
    if span in NOT_OURS:
        return True
    if match := TEST.fullmatch(span):
        return match[1] in names.files and f"def {match[2]}(" in (ROOT / match[1]).read_text(encoding="utf-8")
    if FILE.fullmatch(span):
        return any(f"/{file}".endswith(f"/{span}") for file in names.files)
    if FOLDER.fullmatch(span):
        return any(f"/{span.strip('/')}/" in f"/{file}/" for file in names.files)
    if MODULE.fullmatch(span):
        return span in names.modules
    if match := CLASS.fullmatch(span):
        return match[1] in names.globals
    if match := MEMBER.fullmatch(span):
        return match[2] in names.members_of(match[1])
    if match := CALL.fullmatch(span):
        return match[1] in names.functions
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_in_backticks_exist(page: Path) -> None:
    assert {span for span in spans(page) if not is_known(span)} == set()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("api/service.py", "api/ids.py"),
        ("mstar_core/graph/", "mstar_core/graphs/"),
        ("mstar_core.errors.NotFound", "mstar_core.errors.Lost"),
        ("mstar_core.config", "mstar_core.settings"),
        ("AdmissionQueue", "AdmissionList"),
        ("KVSpec", "KVSpecification"),
        ("Supervisor.run", "Supervisor.walk"),
        ("choose()", "choose_all()"),
        ("Run(keep=())", "RunAll(keep=())"),
        ("tests/test_structure.py::test_a_cycle_is_found", "tests/test_structure.py::test_a_cycle"),
    ],
)
def test_a_wrong_name_is_found(right: str, wrong: str) -> None:
    assert is_known(right)
    assert not is_known(wrong)


def test_every_exception_is_used() -> None:
    """A name that no page mentions needs no exception."""
    assert set() == NOT_OURS - {span for page in PAGES for span in spans(page)}
