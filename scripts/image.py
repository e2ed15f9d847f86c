"""Build of the container images from the Containerfile, with the sizes of their layers. Run by `make image`.

Uses docker, podman or buildah, the first of them that works. `--check` starts the trained miniature in a container, as
the image's user, and sends it a request. Options of the builder follow after `--`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CONTAINERFILE = ROOT / "Containerfile"
TARGETS = ("cpu", "cuda")
BUILDERS = ("docker", "podman", "buildah")
HINT = "install docker, podman or buildah, as by `apt-get install buildah`, or start the docker daemon"

CHECK = """set -eu
echo "user $(id -u):$(id -g)"
mstarctl version
mstarctl up orpheus:mini --device cpu --detach --wait
mstarctl call orpheus --text "Hello there." --out /tmp/hello.wav
mstarctl down orpheus
test -s /tmp/hello.wav
"""
"""Runs in a container."""


class Layer(NamedTuple):
    """A layer of an image. made_by: the instruction. Bytes as stored on disk, uncompressed."""

    size: int
    made_by: str


def main() -> int:
    """Build the selected targets and print their layers. Returns 1 without a builder or if a step fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all targets")
    parser.add_argument("--name", default="mstarctl", help="name of the image; the target becomes its tag")
    parser.add_argument("--plugins", help="distributions of plugins, separated by blanks; default: all")
    parser.add_argument("--base", help="base image: Debian with Python 3.11 or 3.12")
    parser.add_argument("--check", action="store_true", help="start a miniature in each image and send it a request")
    parser.add_argument("options", nargs="*", help="options of the builder, after --")
    arguments = parser.parse_args()
    builder = find_builder()
    if builder is None:
        print(f"error: none of {', '.join(BUILDERS)} works here\n  try: {HINT}", file=sys.stderr)
        return 1
    values = {"PLUGINS": arguments.plugins, "BASE": arguments.base}
    chosen = {name: value for name, value in values.items() if value}
    try:
        for target in arguments.target or TARGETS:
            image = f"{arguments.name}:{target}"
            subprocess.run(build_command(builder, target, image, chosen, arguments.options), check=True, cwd=ROOT)
            report(image, layers(builder, image))
            if arguments.check:
                check(builder, image)
    except subprocess.CalledProcessError as error:
        print(f"error: {Path(error.cmd[0]).name} {error.cmd[1]} failed with exit {error.returncode}", file=sys.stderr)
        return 1
    return 0


def find_builder() -> str | None:
    """Return the name of the first builder that is installed and answers, None without one."""
    for name in BUILDERS:
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True, check=False).returncode == 0:
            return name
    return None


def build_command(
    builder: str, target: str, image: str, values: dict[str, str], options: Sequence[str] = ()
) -> list[str]:
    """Return the command that builds a target. values: build arguments."""
    own = {"docker": [], "podman": ["--format", "docker"], "buildah": ["--format", "docker", "--layers"]}[builder]
    words = [word for name, value in values.items() for word in ("--build-arg", f"{name}={value}")]
    return [
        builder,
        "build",
        *own,
        "--target",
        target,
        "--tag",
        image,
        "--file",
        str(CONTAINERFILE),
        *words,
        *options,
        ".",
    ]  # a format of docker keeps HEALTHCHECK, which OCI images lack


def layers(builder: str, image: str) -> list[Layer]:
    """Return the layers of a built image, the base's first, from an archive of it."""
    with tempfile.TemporaryDirectory(prefix="mstar-image-", dir=os.environ.get("TMPDIR")) as folder:
        archive = Path(folder) / "image.tar"
        save = {
            "docker": ["docker", "save", "--output", str(archive), image],
            "podman": ["podman", "save", "--quiet", "--output", str(archive), image],
            "buildah": ["buildah", "push", "--quiet", image, f"docker-archive:{archive}"],
        }
        subprocess.run(save[builder], check=True)
        return archived_layers(archive)


def archived_layers(archive: Path) -> list[Layer]:
    """Return the layers in an archive of `docker save`. Instructions without a layer are left out."""
    with tarfile.open(archive) as tar:
        members = {member.name: member for member in tar.getmembers()}

        def read(name: str) -> Any:
            file = tar.extractfile(name)
            assert file is not None
            return json.load(file)

        (image,) = read("manifest.json")
        history = read(image["Config"]).get("history", [])
        sizes = [
            (tar.getmember(link) if (link := members[name].linkname) else members[name]).size
            for name in image["Layers"]
        ]
    made_by = [entry.get("created_by", "") for entry in history if not entry.get("empty_layer")]
    made_by = [""] * (len(sizes) - len(made_by)) + made_by
    return [Layer(size, text) for size, text in zip(sizes, made_by, strict=True)]


def report(image: str, found: Sequence[Layer]) -> None:
    """Print the size of an image and of its layers."""
    print(f"{image}  {sum(layer.size for layer in found) / 1e6:.0f} MB in {len(found)} layers")
    for layer in found:
        print(f"  {layer.size / 1e6:8.1f} MB  {' '.join(layer.made_by.split())[:90]}")


def check(builder: str, image: str) -> None:
    """Run CHECK in a container of the image, as its user. Raises CalledProcessError if it fails."""
    if builder != "buildah":
        subprocess.run([builder, "run", "--rm", "--init", "--entrypoint", "sh", image, "-c", CHECK], check=True)
        return
    made = subprocess.run(["buildah", "from", image], check=True, capture_output=True, text=True).stdout.strip()
    try:
        subprocess.run(["buildah", "run", "--isolation", "chroot", made, "--", "sh", "-c", CHECK], check=True)
    finally:
        subprocess.run(["buildah", "rm", made], check=False, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
