"""Checkpoints that a package contains: `NAME:mini`."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstar_core.config.files.load import split_name
from mstar_core.errors import NotFound, WeightsError
from mstar_core.weights.sources import shipped_checkpoint


def test_a_name_selects_an_embedded_checkpoint() -> None:
    assert split_name("pi05:mini") == ("pi05", "mini")
    assert split_name("pi05:tiny") == ("pi05", "tiny")
    assert split_name("pi05") == ("pi05", "")
    with pytest.raises(NotFound, match="no variant 'minis'") as refused:
        split_name("pi05:minis")
    assert "mini" in refused.value.hint


def test_a_package_without_weights_refuses_its_miniature(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no weights in this package") as refused:
        shipped_checkpoint(tmp_path, "pi05:mini")
    assert "train/" in refused.value.hint
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert shipped_checkpoint(tmp_path, "pi05:mini") == tmp_path
