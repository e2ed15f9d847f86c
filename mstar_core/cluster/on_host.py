"""Functions that Ray runs on the hosts of a cluster: they start our programs there and return what these print.

Ray receives them by value, so they need the standard library alone: a host without mstarctl runs them too.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

FACTS_S = 30.0
AGENT_S = 60.0
"""Seconds until an agent has to listen. On a busy host, Python alone takes several of them."""


def read_facts(query: dict[str, object]) -> dict[str, object]:
    """Return fields of HostFacts. query: a HostQuery; what Ray offers of the GPUs is added here."""
    query = {**query, "visible": _raylet_environment().get("CUDA_VISIBLE_DEVICES")}
    try:
        facts: dict[str, object] = json.loads(_run("mstar_core.cluster.facts_program", json.dumps(query), FACTS_S))
        return facts
    except (RuntimeError, ValueError) as error:
        return {"fault": str(error), "versions": {"python": platform.python_version(), **_versions(query)}}


def start_agent(order: dict[str, object]) -> dict[str, object]:
    """Start an agent and return its StartedAgent. order: an AgentOrder. Raises RuntimeError."""
    line = _run("mstar_core.agent", json.dumps(order), AGENT_S, "--detach")
    try:
        record: dict[str, object] = json.loads(line)
        return record
    except ValueError:
        raise RuntimeError(f"the agent printed no record: {line[:200]!r}") from None


def reserved_gpus(count: int) -> list[int]:
    """Return the indices (of NVML) of the GPUs that Ray has assigned to this task. Raises RuntimeError."""
    if count == 0:  # the variable of a task without GPUs may be that of `ray start`
        return []
    words = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    if all(word.isdigit() for word in words):
        return [int(word) for word in words]
    facts = json.loads(_run("mstar_core.cluster.facts_program", "{}", FACTS_S))
    indices = [gpu["index"] for word in words for gpu in facts["gpus"] if gpu["key"].startswith(word)]
    if len(indices) != len(words):
        raise RuntimeError(f"Ray assigned {', '.join(words)}, which the driver does not list as GPUs")
    return indices


def _run(module: str, text: str, limit_s: float, *arguments: str) -> str:
    """Return the output of a module of ours, run in Ray's Python. Raises RuntimeError with the end of its errors."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        # Files, not pipes: the end of a pipe would wait for a detached agent that has kept it open.
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            text=True,
            cwd="/",
            env=_environment(),
            start_new_session=True,
        )
        try:
            process.communicate(text, timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise RuntimeError(f"{module} did not answer within {limit_s:.0f} s") from None
        output.seek(0)
        errors.seek(0)
        if process.returncode == 0:
            return output.read()
        lines = errors.read().strip().splitlines()
        raise RuntimeError(_fault(lines, process.returncode))


def _fault(lines: list[str], code: int) -> str:
    last = lines[-1] if lines else f"it ended with {code} and wrote nothing"
    missing = re.search(r"No module named '?(mstar_core[\w.]*)", last)
    if missing is None:
        return last
    version = _versions({"distributions": ["mstarctl"]}).get("mstarctl")
    here = f"mstarctl {version}, which has no {missing[1]}" if version else "no mstarctl"
    return f"Ray's Python ({sys.executable}) has {here}"


def _environment() -> dict[str, str]:
    """Return the environment of `ray start` on this host. That of a task holds settings of Ray for tasks."""
    return {name: value for name, value in _raylet_environment().items() if not name.startswith("RAY_")}


def _raylet_environment() -> dict[str, str]:
    raylet = os.environ.get("RAY_RAYLET_PID", str(os.getppid()))
    try:
        entries = Path(f"/proc/{raylet}/environ").read_bytes().split(b"\0")
    except OSError:
        return dict(os.environ)
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if b"=" in entry)
    return {name: value for name, _, value in pairs}


def _versions(query: dict[str, object]) -> dict[str, str]:
    found = {}
    names = query.get("distributions")
    for name in names if isinstance(names, list | tuple) else ():
        try:
            found[str(name)] = metadata.version(str(name))
        except metadata.PackageNotFoundError:
            continue
    return found
