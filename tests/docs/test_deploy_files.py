"""The container files name commands, options, packages and directories that exist."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from mstarctl.main import VERBS, resolve

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))


def parse_up(words: list[str]) -> None:
    """Parse the words of a container's command without running it. Raises for an unknown option."""
    verb = next(verb for verb in VERBS if verb.name == words[0])
    command: Any = resolve(verb)
    command.make_context(words[0], list(words[1:]), resilient_parsing=False)


def test_the_commands_of_the_containers_parse() -> None:
    parse_up(json.loads(re.findall(r"^CMD (.*)$", DOCKERFILE, re.M)[0]))
    parse_up(COMPOSE["services"]["orpheus"]["command"])
    with pytest.raises(Exception, match="No such option"):
        parse_up(["up", "orpheus", "--hosts", "x"])


def test_packages_and_extras_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in re.findall(r"^ARG EXTRAS=(.*)$", DOCKERFILE, re.M)[0].split(","):
        assert extra in project["optional-dependencies"]
    plugins = {path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")}
    assert set(re.findall(r'^ARG PLUGINS="(.*)"$', DOCKERFILE, re.M)[0].split()) == plugins


def test_the_image_and_its_volumes_use_the_directories_of_the_unit() -> None:
    volumes = {volume.partition(":")[2] for volume in COMPOSE["services"]["orpheus"]["volumes"]}
    actual = re.findall(r"install -d -m 700 -o mstar (.*)$", DOCKERFILE, re.M)[0].split()
    assert volumes < set(actual) and COMPOSE["services"]["orpheus"]["build"]["dockerfile"] == "deploy/Dockerfile"
    for name, value in re.findall(r"(\w+)=(/\S+)", re.findall(r"^ENV (.*)$", DOCKERFILE, re.M)[0]):
        assert name in (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
        assert any(folder.startswith(value) or value.startswith(folder) for folder in actual)
