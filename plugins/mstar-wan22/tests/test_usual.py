"""Defaults of requests by kind of checkpoint. Source: the model's specification, sections 1 and 7."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mstar_wan22.checkpoint.config import read_sizes
from mstar_wan22.request.usual import Usual, read_usual
from mstar_wan22.sources.tiny import write_wan22, write_wan22_a14b, write_wan22_i2v_a14b


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (write_wan22, Usual()),
        (write_wan22_a14b, Usual(fps=16, steps=40, scales=(4.0, 3.0), shift=12.0)),
        (write_wan22_i2v_a14b, Usual(fps=16, steps=40, scales=(3.5, 3.5))),
    ],
)
def test_official_kinds(write: Callable[[Path], Path], expected: Usual, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint")
    assert read_usual(folder, read_sizes(folder)) == expected
