"""Gluon kernels are imported with the Triton release that they need; else None, with one log line."""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType

import pytest


@pytest.mark.parametrize(("version", "is_imported"), [("3.6.0", True), ("3.6.1+cuda", True), ("3.7.0", False)])
def test_kernels_need_their_triton_release(
    version: str, is_imported: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    triton = ModuleType("triton")
    triton.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.delitem(sys.modules, "mstar_core.layers.kernels.gluon", raising=False)
    gluon = importlib.import_module("mstar_core.layers.kernels.gluon")
    monkeypatch.setitem(sys.modules, "mstar_core.layers.kernels.gluon", gluon)  # restored by monkeypatch
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            actual = gluon.gluon_kernels("colorsys", "tests")
            assert (actual is importlib.import_module("colorsys")) if is_imported else actual is None
    assert [version in record.getMessage() for record in caplog.records] == ([] if is_imported else [True])
