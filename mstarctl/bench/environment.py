"""Environment of a result: versions, host, GPUs, configuration. Comparisons show what differs in it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mstarctl.bench.target import BenchTarget

if TYPE_CHECKING:
    from mstarctl.client import AdminClient

PACKAGES: Final = (
    "mstarctl",
    "torch",
    "triton",
    "flashinfer-python",
    "numpy",
    "msgspec",
    "pyzmq",
    "sanic",
    "transformers",
)
GPU_FIELDS: Final = ("name", "uuid", "driver_version", "clocks.sm", "clocks.mem", "power.limit", "memory.total")
SMI_S: Final = 20


def environment(target: BenchTarget) -> dict[str, Any]:
    """Return what a reader needs to judge or repeat a run."""
    return {**host_environment(), "server": server_facts(target)}


def host_environment() -> dict[str, Any]:
    """Return versions, host, GPUs and sources."""
    packages = {name: version for name in PACKAGES if (version := _version(name)) is not None}
    packages |= {
        dist.metadata["Name"]: dist.version
        for dist in importlib.metadata.distributions()
        if (dist.metadata["Name"] or "").startswith("mstar-")
    }
    return {
        "packages": packages,
        "python": platform.python_version(),
        "cuda": torch_cuda(),
        "host": {
            "name": platform.node(),
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "load_before": round(os.getloadavg()[0], 2),
        },
        "gpus": gpus(),
        "source": source(),
    }


def server_facts(target: BenchTarget) -> dict[str, Any]:
    """Return the model, endpoint, placement and configuration of the server, as far as it tells."""
    facts: dict[str, Any] = {"url": target.url, "model": target.model, "is_tiny": target.card.is_tiny}
    return facts if target.admin is None else {**facts, **deployment_facts(target.admin)}


def deployment_facts(admin: AdminClient) -> dict[str, Any]:
    """Return name, configuration and placement of a deployment."""
    snapshot = admin.snapshot(("ranks", "nodes"))
    head = snapshot["deployment"]
    kept = ("name", "config", "versions", "transport", "weights", "restarts", "slots", "queue_limit", "pages_total")
    placement = {
        key: {name: rank.get(name) for name in ("device", "nodes") if name in rank}
        for key, rank in snapshot["ranks"].items()
    }
    return {**{name: head.get(name) for name in kept}, "boot": snapshot.get("boot"), "ranks": placement}


def source() -> dict[str, Any]:
    """Return the commit of the sources and whether they have changes; None without a history."""
    folder = Path(__file__).resolve().parents[2]

    def git(*words: str) -> str | None:
        if shutil.which("git") is None or not (folder / ".git").exists():
            return None
        done = subprocess.run(["git", *words], cwd=folder, check=False, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    status = git("status", "--porcelain", "-uno")
    return {"commit": git("rev-parse", "--short", "HEAD"), "is_dirty": None if status is None else bool(status)}


def gpus() -> list[dict[str, str]]:
    """Return name, clocks, power limit and memory of each GPU by nvidia-smi; empty without one."""
    command = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SMI_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.strip().splitlines() if done.returncode == 0 else []
    return [dict(zip(GPU_FIELDS, (value.strip() for value in line.split(",")), strict=False)) for line in lines]


def torch_cuda() -> str | None:
    """Return the CUDA version in torch's version file, without importing torch."""
    spec = importlib.util.find_spec("torch")
    path = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    text = path.read_text() if path is not None and path.is_file() else ""
    setting = re.search(r"^cuda\b[^=]*= '([\d.]+)'", text, re.MULTILINE)
    return setting.group(1) if setting else None


def cpu_name() -> str:
    """Return the processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def ceiling_file() -> Path:
    """Return the file with the last ceiling that `bench selftest` measured on this host."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "mstar" / "bench-ceiling.json"


def last_ceiling() -> dict[str, Any] | None:
    """Return the last ceiling of this host; None if there is none."""
    try:
        ceiling: dict[str, Any] = json.loads(ceiling_file().read_text())
    except (OSError, ValueError):
        return None
    return ceiling


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
