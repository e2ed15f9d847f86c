"""Specifications of running deployments, as the commands read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mstar_core.errors import ConfigError, NotFound
from mstar_core.host.run_dir import RunDirectory
from mstarctl.client.endpoints import spec_of


def test_a_deployment_of_another_version_is_named(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "speech")
    with pytest.raises(NotFound, match="has just ended"):
        spec_of(run)
    run.spec.parent.mkdir(parents=True)
    run.spec.write_text(json.dumps({"name": "speech", "unheard_of": 1}), encoding="utf-8")
    with pytest.raises(ConfigError, match="'speech' was started by another version") as caught:
        spec_of(run)
    assert "mstarctl down speech" in caught.value.hint
