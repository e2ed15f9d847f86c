"""Recorded specialisations of kernels survive the way through a file; stale ones are named."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mstar_core.engine.cuda_graphs.kernel_list import line_of, source_of


class Source:
    """Fake of Triton's ASTSource."""

    def __init__(self, fn: Any, signature: Any, constants: Any, attrs: Any) -> None:
        self.fn, self.signature, self.constants, self.attrs = fn, signature, constants, attrs


class Kernel:
    """Fake of a JIT function."""

    cache_key = "key"

    def __init__(self, name: str, arguments: list[str]) -> None:
        self.fn, self.__module__, self.__qualname__, self.arg_names = None, "kernels", name, arguments

    def is_gluon(self) -> bool:
        return False


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Kernel]:
    found = {"main": Kernel("main", ["x", "size", "block", "inner"]), "helper": Kernel("helper", [])}
    module, compiler = ModuleType("kernels"), ModuleType("triton.compiler")
    vars(module).update(found)
    vars(compiler)["ASTSource"] = Source
    monkeypatch.setitem(sys.modules, "kernels", module)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.compiler", compiler)
    return found


def source(kernels: dict[str, Kernel]) -> Source:
    return Source(
        kernels["main"],
        {"x": "*bf16", "size": "i32", "block": "constexpr", "inner": "constexpr"},
        {(2,): 128, (3,): kernels["helper"], (0, 1): (True, None, "ieee", 0.5)},
        {(0,): [["tt.divisibility", 16]]},
    )


METADATA = {
    "hash": "h",
    "target": SimpleNamespace(arch=90),
    "num_warps": 8,
    "num_stages": 3,
    "shared": 0,
    "maxnreg": None,
}


def test_a_specialisation_is_read_as_it_was_recorded(kernels: dict[str, Kernel]) -> None:
    given = source(kernels)
    entry = json.loads(line_of(given, METADATA))
    found, options = source_of(entry)
    assert found.fn is given.fn and found.signature == given.signature
    assert list(found.signature) == kernels["main"].arg_names
    assert found.constants == given.constants and found.attrs == given.attrs
    assert options == {"num_warps": 8, "num_stages": 3} and (entry["hash"], entry["arch"]) == ("h", 90)


def test_an_entry_of_a_kernel_that_has_changed_is_stale(kernels: dict[str, Kernel]) -> None:
    entry = json.loads(line_of(source(kernels), METADATA))
    kernels["main"].arg_names = ["x", "length"]
    with pytest.raises(ValueError, match="kernels:main has other arguments now: x, length"):
        source_of(entry)
    with pytest.raises(ValueError, match="kernels:missing is gone"):
        source_of({**entry, "kernel": "kernels:missing"})
