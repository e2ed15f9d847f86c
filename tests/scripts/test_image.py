"""Container images: the builder's command, layers read from an archive, and the error without a builder."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.script import script

ROOT = Path(__file__).resolve().parents[2]
image = script("image")
BUILDER = """#!/bin/sh
# Answers as docker does: info, build, and save from a prepared archive.
echo "$@" >> "$CALLS"
case $1 in
  info) exit "${DOWN:-0}" ;;
  save) cp "$ARCHIVE" "$3" ;;
esac
"""


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Return an archive as `docker save` writes it: a layer of the base, one without a size, two of the build."""
    path = tmp_path / "saved.tar"
    history = [
        {"created_by": "base"},
        {"created_by": "ENV A=1", "empty_layer": True},
        {"created_by": "RUN   install \t one"},
        {"created_by": "RUN two"},
    ]
    with tarfile.open(path, "w") as tar:
        for name, size in (("a.tar", 3_000_000), ("b.tar", 2_000_000), ("c.tar", 500_000)):
            add(tar, name, bytes(size))
        add(tar, "config.json", json.dumps({"history": history}).encode())
        layers = ["a.tar", "b.tar", "c.tar"]
        add(tar, "manifest.json", json.dumps([{"Config": "config.json", "Layers": layers}]).encode())
    return path


def run(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script with nothing on the PATH but what is in `tmp_path/bin`, and a shell."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    for name in ("sh", "cp"):
        if not (tmp_path / "bin" / name).exists():
            (tmp_path / "bin" / name).symlink_to(f"/bin/{name}")
    environment = {**os.environ, "PATH": str(tmp_path / "bin"), "CALLS": str(tmp_path / "calls"), **variables}
    command = [sys.executable, str(ROOT / "scripts" / "image.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def install(tmp_path: Path, name: str) -> None:
    (tmp_path / "bin").mkdir(exist_ok=True)
    (tmp_path / "bin" / name).write_text(BUILDER)
    (tmp_path / "bin" / name).chmod(0o755)


def test_layers_are_the_instructions_that_have_one(archive: Path) -> None:
    layers = image.archived_layers(archive)
    assert [(layer.size, " ".join(layer.made_by.split())) for layer in layers] == [
        (3_000_000, "base"),
        (2_000_000, "RUN install one"),
        (500_000, "RUN two"),
    ]


def test_without_a_builder_the_error_names_those_that_would_do(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.returncode == 1
    assert "none of docker, podman, buildah works here" in result.stderr and "try: install" in result.stderr


def test_a_builder_that_does_not_answer_is_passed_over(tmp_path: Path) -> None:
    install(tmp_path, "docker")
    assert run(tmp_path, DOWN="1").returncode == 1


def test_the_image_is_built_and_its_layers_are_shown(tmp_path: Path, archive: Path) -> None:
    install(tmp_path, "docker")
    result = run(tmp_path, "--target", "cpu", "--plugins", "mstar-orpheus", "--", "--pull", ARCHIVE=str(archive))
    assert result.returncode == 0, result.stderr
    build = (tmp_path / "calls").read_text().splitlines()[1]
    assert build.startswith("build --target cpu --tag mstarctl:cpu ")
    assert "--build-arg PLUGINS=mstar-orpheus --pull ." in build
    assert "mstarctl:cpu  6 MB in 3 layers" in result.stdout and "0.5 MB  RUN two" in result.stdout


@pytest.mark.parametrize("builder", ["docker", "podman", "buildah"])
def test_every_builder_keeps_the_health_check(builder: str) -> None:
    command: Any = image.build_command(builder, "cuda", "mstarctl:cuda", {})
    assert command[:2] == [builder, "build"] and command[-1] == "."
    assert ("docker" in command[command.index("--format") + 1]) if builder != "docker" else "--format" not in command


def test_requirements_are_those_of_the_project_and_its_extras() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "requirements.py"), "runtime,ray"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert any(line.startswith("pyzmq") for line in lines) and any(line.startswith("ray>") for line in lines)
    assert not any(line.startswith("flashinfer") for line in lines)
    wrong = subprocess.run([*command[:-1], "runtyme"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 1 and "no extra 'runtyme'" in wrong.stderr
