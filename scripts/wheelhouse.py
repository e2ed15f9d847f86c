"""Collection of wheels and kernels to install the project on a GPU machine without network, beside its own torch.

Run by `make wheelhouse`. Pins come from wheelhouse.lock alone. The folder holds the wheels, `aot/` with the attention
kernels, a pack of Triton kernels, manifest.json, and install.sh, which checks hashes and versions, installs and proves
every import. Wheels as downloaded are kept beside the folder, because some are stored without files that are of no use
on the target: see SPARED.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "scripts" / "wheelhouse.lock"
GLIBC_MINORS = (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
OPTIONAL = {"attention": "cuda", "terminal": "tui", "video": "video", "realtime": "realtime"}
"""Group -> option that adds it; the other groups are always included."""

IMPORTS = {
    "flashinfer-python": "flashinfer",
    "apache-tvm-ffi": "tvm_ffi",
    "sanic-routing": "sanic_routing",
    "pyzmq": "zmq",
    "attrs": "attr",
    "nvidia-ml-py": "pynvml",
    "pyyaml": "yaml",
    "pillow": "PIL",
    "markdown-it-py": "markdown_it",
    "pytest-asyncio": "pytest_asyncio",
    "mdit-py-plugins": "mdit_py_plugins",
    "linkify-it-py": "linkify_it",
    "uc-micro-py": "uc_micro",
}
"""Distributions whose import name differs from their name."""


GIVEN = frozenset(
    (
        *("torch", "triton", "numpy", "jinja2", "typing-extensions", "setuptools"),
        *("transformers", "tokenizers", "safetensors", "huggingface-hub", "httpx", "pyyaml", "packaging"),
        *("typer", "rich", "pygments", "markdown-it-py", "mdurl"),
        *("pillow", "uvloop"),
    )
)
"""Packages that the target's image has: torch, transformers, what these two need, and two large ones.

Every other package that the project needs at run time is in the lock, without the extras that no default enables.
"""


STANDALONE = (
    *("pyzmq", "msgspec", "httptools", "ujson", "websockets", "multidict", "aiofiles", "cffi", "pycparser"),
    *("pybase64", "aiohappyeyeballs", "attrs", "frozenlist", "idna", "propcache", "yarl"),
    *("pluggy", "nvidia-ml-py", "ftfy", "wcwidth"),
)
"""Packages that import without any package of the target's image."""

OWN = ("mstar_core.errors", "mstar_core.config.deployment", "mstar_core.messages.wire")
"""Modules of the project that import without other packages."""

SOURCES = tuple(f"flashinfer/data/{name}/" for name in ("cutlass", "cccl", "spdlog", "include")) + tuple(
    f"flashinfer/data/csrc/{name}/" for name in ("nv_internal", "kda", "fmha_v2", "fused_moe", "xqa")
)
"""Sources of kernels. The target has the kernels prebuilt."""

TRITON = "triton-kernels.tar.xz"
"""Pack of compiled Triton kernels."""


@dataclass(frozen=True, kw_only=True)
class Pin:
    """One line of the lock."""

    name: str
    version: str
    group: str
    sha256: str


def main() -> int:
    """Build the folder. Returns 1 if folder and repository together exceed the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", default="3.12", help="version of the target's Python")
    parser.add_argument("--cuda", action="store_true", help="FlashInfer")
    parser.add_argument("--tui", action="store_true", help="the terminal screens")
    parser.add_argument("--video", action="store_true", help="video containers")
    parser.add_argument("--realtime", action="store_true", help="detection of speech in /v1/realtime: 5 MB")
    parser.add_argument("--kernels", metavar="ARCH", help="attention kernels for this architecture, as 9.0a")
    parser.add_argument("--limit", type=int, default=64, help="MiB that folder and repository may have together")
    parser.add_argument(
        "--verify",
        nargs="?",
        const="",
        metavar="PYTHON",
        help="install the part without CUDA here and import it, with an interpreter of that version",
    )
    options = parser.parse_args()
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    spared = (*miniatures(), *(SOURCES if options.kernels else ()))
    pins = chosen(locked(), options)
    wheels = {
        spare(path, out / path.name, spared): pin
        for path, pin in fetch(out.with_name(f"{out.name}-downloads"), pins, options.python).items()
    }
    wheels |= own_wheels(out, spared)
    for stale in set(out.glob("*.whl")) - set(wheels):
        stale.unlink()
    if options.kernels:
        command = [sys.executable, ROOT / "scripts" / "kernels.py", out / "aot", "--arch", options.kernels]
        subprocess.run(command, check=True)
        pack_triton_kernels(out / TRITON, options.kernels, options.python)
    write_manifest(out, wheels, options.python)
    write_install(out, [pin for pin in pins if pin.group != "test"], options.python)
    if options.verify is not None:
        verify(wheels, options.python, options.verify)
    return weigh(out, options.limit)


def pack_triton_kernels(out: Path, arch: str, python: str) -> None:
    """Compile the recorded Triton kernels for the target, if a list of them is kept."""
    number = "".join(letter for letter in arch if letter.isdigit())
    script = ROOT / "scripts" / "triton_kernels.py"
    command = [sys.executable, script, "build", out, "--arch", number, "--python", python]
    if subprocess.run(command, check=False).returncode != 0:
        print("some recorded Triton kernels are stale: a first start on the target compiles theirs", file=sys.stderr)


def locked() -> list[Pin]:
    """Return every pin of the lock file."""
    lines = (line.split() for line in LOCK.read_text().splitlines() if line and not line.startswith("#"))
    return [Pin(name=name, version=version, group=group, sha256=digest) for name, version, group, digest in lines]


def chosen(pins: Iterable[Pin], options: argparse.Namespace) -> list[Pin]:
    """Return the pins of the groups that are always included, and of those whose option is given."""
    return [pin for pin in pins if getattr(options, OPTIONAL.get(pin.group, ""), True)]


def miniatures() -> tuple[str, ...]:
    """Return the folders of trained miniatures in wheels. The repository, which travels beside the wheels, has them."""
    found = sorted(ROOT.glob("plugins/*/src/*/checkpoint/mini"))
    return tuple(f"{path.parents[1].name}/checkpoint/mini/" for path in found)


def spare(wheel: Path, out: Path, spared: tuple[str, ...]) -> Path:
    """Copy a wheel without the files below these folders, and return the copy."""
    with zipfile.ZipFile(wheel) as given:
        left_out = {name for name in given.namelist() if name.startswith(spared)}
        if not left_out:
            return Path(shutil.copy2(wheel, out))
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
            for entry in given.infolist():
                if entry.filename in left_out:
                    continue
                content = given.read(entry)
                if entry.filename.endswith(".dist-info/RECORD"):
                    lines = content.decode().splitlines(keepends=True)
                    content = "".join(line for line in lines if line.split(",")[0] not in left_out).encode()
                made.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return out


def fetch(out: Path, pins: Iterable[Pin], python: str) -> dict[Path, Pin | None]:
    """Download wheels that are missing or have another hash. Exits if a download differs from the lock."""
    out.mkdir(parents=True, exist_ok=True)
    by_hash = {sha256(path): path for path in out.glob("*.whl")}
    missing = [pin for pin in pins if pin.sha256 not in by_hash]
    if missing:
        platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS]
        platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
        tags = [word for platform in platforms for word in ("--platform", platform)]
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--only-binary=:all:",
            "--python-version",
            python,
            "--implementation",
            "cp",
            *tags,
            "--dest",
            str(out),
            *(f"{pin.name}=={pin.version}" for pin in missing),
        ]
        subprocess.run(command, check=True)
        by_hash = {sha256(path): path for path in out.glob("*.whl")}
    wrong = [pin.name for pin in pins if pin.sha256 not in by_hash]
    if wrong:
        sys.exit(f"these wheels have another hash than {LOCK.name} says: {', '.join(wrong)}")
    return {by_hash[pin.sha256]: pin for pin in pins}


def own_wheels(out: Path, spared: tuple[str, ...]) -> dict[Path, Pin | None]:
    """Build the wheels of the project and its plugins, without the files below these folders."""
    with tempfile.TemporaryDirectory(prefix="mstar-wheelhouse-") as folder:
        subprocess.run([sys.executable, ROOT / "scripts" / "wheels.py", folder], check=True, stdout=subprocess.DEVNULL)
        made = sorted(Path(folder).glob("*.whl"))
        return {spare(path, out / path.name, spared): None for path in made}


def write_manifest(out: Path, wheels: dict[Path, Pin | None], python: str) -> None:
    """Write manifest.json: every file with its hash, size, group and source."""
    files = [
        {"file": path.name, "sha256": sha256(path), "bytes": path.stat().st_size}
        | (asdict(pin) if pin is not None else {"group": "project"})
        for path, pin in sorted(wheels.items())
    ]
    record = out / "aot" / "kernels.json"
    kernels = json.loads(record.read_text()) if record.exists() else {}
    (out / "manifest.json").write_text(json.dumps({"python": python, "files": files, "kernels": kernels}, indent=1))
    sums = [
        f"{sha256(path)}  {path.relative_to(out)}"
        for path in sorted([*wheels, *out.glob("aot/*/*.so"), *out.glob(TRITON)])
    ]
    (out / "SHA256SUMS").write_text("\n".join(sums) + "\n")


def write_install(out: Path, pins: Iterable[Pin], python: str) -> None:
    """Write install.sh, which checks the files, installs into SITE and writes SITE/env.sh to source."""
    names = [*sorted(GIVEN), *(pin.name for pin in pins if pin.name != "html5tagger")]
    modules = " ".join(IMPORTS.get(name, name.replace("-", "_")) for name in names)
    script = out / "install.sh"
    script.write_text(f"""#!/bin/sh
# Installs this wheelhouse beside the torch of PYTHON. Usage: install.sh [SITE]; then: . SITE/env.sh
set -eu
HERE=$(cd "$(dirname "$0")" && pwd)
SITE=${{1:-/tmp/mstar-site}}
PYTHON=${{PYTHON:-python3}}
(cd "$HERE" && sha256sum --quiet -c SHA256SUMS)
"$PYTHON" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "{python}" and "Python {python} is needed")'
"$PYTHON" -c 'import torch; assert torch.__version__ >= "2.11", torch.__version__; print("torch", torch.__version__)'
"$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" "$HERE"/*.whl
cat > "$SITE/env.sh" <<END
export PYTHONPATH=$SITE\\${{PYTHONPATH:+:\\$PYTHONPATH}} PATH=$SITE/bin:\\$PATH
export FLASHINFER_AOT_DIR=$HERE/aot
END
if [ -e "$HERE/{TRITON}" ]; then echo "export MSTAR_KERNELS=$HERE/{TRITON}" >> "$SITE/env.sh"; fi
. "$SITE/env.sh"
for module in {modules} mstar_core mstarctl; do
  "$PYTHON" -c "import $module" || {{ echo "$module cannot be imported" >&2; exit 1; }}
done
for kernel in "$HERE"/aot/*/*.so; do [ -e "$kernel" ] && echo "kernel $(basename "$kernel" .so)"; done
echo "installed into $SITE; now: . $SITE/env.sh"
""")
    script.chmod(0o755)


def verify(wheels: dict[Path, Pin | None], python: str, chosen: str) -> None:
    """Install the wheels that need no CUDA in a fresh environment without network, and import standalone modules."""
    interpreter = chosen or find_python(python)
    light = [path for path, pin in wheels.items() if pin is None or pin.group != "attention"]
    names = {pin.name for pin in wheels.values() if pin is not None}
    modules = [IMPORTS.get(name, name) for name in STANDALONE if name in names] + list(OWN)
    with tempfile.TemporaryDirectory(prefix="mstar-verify-") as folder:
        subprocess.run([interpreter, "-m", "venv", folder], check=True)
        own = Path(folder) / "bin" / "python"
        command = [own, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--disable-pip-version-check", *light]
        subprocess.run(command, check=True)
        for module in modules:
            if subprocess.run([own, "-I", "-c", f"import {module}"], check=False).returncode != 0:
                sys.exit(f"--verify: {module} cannot be imported from its wheel with {interpreter}")
    print(f"verified: {len(light)} wheels install without network, {len(modules)} modules import ({interpreter})")


def find_python(python: str) -> str:
    """Return a working interpreter of this version. A version manager's shim on the path may have none installed."""
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        path = Path(folder) / f"python{python}"
        if path.exists() and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return str(path)
    sys.exit(f"--verify needs Python {python}, and no python{python} on the path runs: name one with --verify PYTHON")


def weigh(out: Path, limit: int) -> int:
    """Return whether folder and repository fit. Prints the total, and the five largest files if they do not."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [path for path in (ROOT / name for name in listed.splitlines()) if path.is_file()]
    files += [path for path in out.rglob("*") if path.is_file()]
    sizes = {path: path.stat().st_size for path in files}
    total = sum(sizes.values()) / (1 << 20)
    print(f"{out}: with the repository {total:.1f} of {limit} MiB")
    if total <= limit:
        return 0
    for path in sorted(sizes, key=lambda path: -sizes[path])[:5]:
        print(f"  {sizes[path] / (1 << 20):6.1f} MiB  {path}", file=sys.stderr)
    return 1


def sha256(path: Path) -> str:
    """Return the hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
