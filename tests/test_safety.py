"""Forbidden calls: those that execute bytes from outside, or decode them without validation."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path
    for folder in ("mstar_core", "mstarctl", "plugins")
    for path in (ROOT / folder).rglob("*.py")
    if "tests" not in path.relative_to(ROOT).parts
)
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
PICKLING = {"ForkingPickler", "Pipe", "Manager"}
"""Names of multiprocessing whose readers unpickle what the other process wrote."""

FORBIDDEN_CALLS = {"eval", "exec", "compile"}


def sins(tree: ast.AST) -> Iterator[str]:
    """Describe each forbidden call in a module."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (f"imports {a.name}" for a in names if a.name.partition(".")[0] in FORBIDDEN_IMPORTS)
            case ast.ImportFrom(module="multiprocessing.reduction", names=names):
                yield from (f"imports {a.name}, which pickles" for a in names if a.name != "DupFd")
            case ast.ImportFrom(
                module="multiprocessing.connection" | "multiprocessing.queues" | "multiprocessing.managers"
            ):
                yield "imports a channel that pickles"
            case ast.Attribute(attr=name) | ast.alias(name=name) if name in PICKLING:
                yield f"uses multiprocessing's {name}, which pickles"
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in FORBIDDEN_IMPORTS:
                yield f"imports from {module}"
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
                yield f"calls {name}"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords):
                if not _is_true(keywords, "weights_only"):
                    yield "calls torch.load without weights_only=True"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="yaml"), attr="load" | "unsafe_load" | "full_load")):
                yield "loads YAML with a loader that makes objects"
            case ast.keyword(arg="trust_remote_code", value=value):
                if not (isinstance(value, ast.Constant) and value.value is False):
                    yield "trusts remote code"


def _is_true(keywords: list[ast.keyword], name: str) -> bool:
    return any(k.arg == name and isinstance(k.value, ast.Constant) and k.value.value is True for k in keywords)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_turns_bytes_into_code(path: Path) -> None:
    assert list(sins(ast.parse(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "from multiprocessing.reduction import ForkingPickler",
        "from multiprocessing import reduction\nreduction.ForkingPickler.loads(b'')",
        "from multiprocessing import Pipe",
        "import multiprocessing\nmultiprocessing.get_context('spawn').Pipe()",
        "from multiprocessing.connection import Connection",
        "eval('1')",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "import yaml\nyaml.load('x', Loader=None)",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
    ],
)
def test_the_check_sees_each_of_them(text: str) -> None:
    assert list(sins(ast.parse(text)))


def test_the_check_lets_safe_loading_pass() -> None:
    safe = "import torch, yaml\ntorch.load('x', weights_only=True)\nyaml.safe_load('x')\nre.compile('x')"
    assert not list(sins(ast.parse(safe)))
