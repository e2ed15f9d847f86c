"""The name of a deployment has one rule, in a file and on the command line."""

from __future__ import annotations

import json

import pytest

from mstar_core.config.name import NAME_HINT, check_name
from mstar_core.errors import ConfigError
from tests.config.conftest import Resolve
from tests.config.test_deployment_wait_spin import TEXT


@pytest.mark.parametrize("name", ["a", "A1", "a" * 64, "2b_x.y-z"])
def test_a_valid_name_is_valid_everywhere(resolved: Resolve, name: str) -> None:
    assert resolved(TEXT, f"name={name}").name == check_name(name) == name


@pytest.mark.parametrize("name", ["a" * 65, ".a", "-a", "a b", "a/b", "ä"])
def test_an_invalid_name_is_refused_everywhere(resolved: Resolve, name: str) -> None:
    for refuse in (lambda: resolved(f"name: {json.dumps(name)}\n{TEXT}"), lambda: check_name(name)):
        with pytest.raises(ConfigError) as caught:
            refuse()
        assert "cannot name a deployment" in caught.value.title and caught.value.hint == NAME_HINT
