"""The four models of the benchmark: their budgets, checkpoints and requests, and the gateway's serve.yaml."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.robot_requests import STATE, TEXT, images_of
from bench.serving.figures import ROOT
from mstarctl.bench.client.protocols import BOUNDARY, form

MODELS: Final = {"omni": "qwen3_omni", "bagel": "bagel", "orpheus": "orpheus", "pi05": "pi05"}
BUDGETS: Final = {"omni": "85GiB", "bagel": "44GiB", "orpheus": "24GiB", "pi05": "16GiB"}
"""Budgets on a GPU of 141 GB (140.4 GiB): weights of 66, 28, 6 and 7 GiB with their caches and graphs.

Qwen3-Omni and BAGEL leave room for what the others keep while they sleep, and for none of the others awake.
"""

HOST: Final = "84GiB"
"""Host memory for sleeping models, counted by their budgets: all but Qwen3-Omni keep their weights there, 41 GiB.

Pinned copies of Qwen3-Omni's 61 GiB would leave too little of 128 GiB, so it sleeps at level 2: it drops its weights.
"""

TINY_BUDGETS: Final = {"omni": "900MiB", "bagel": "700MiB", "orpheus": "600MiB", "pi05": "500MiB"}
TINY_HOST: Final = "1800MiB"
FAKE: Final = "cpu:0=2GiB"

STARTS: Final = (("omni", "bagel"), ("orpheus", "pi05"))
"""Models that start at once: those of the first turn fit together, those of the second need the sleep of another."""

WRITERS: Final = {
    "omni": "from bench.families.omni_checkpoint import write_random as w; w(Path(sys.argv[1]), seed=1)",
    "bagel": "from bench.families.bagel_checkpoint import write_random as w; w(Path(sys.argv[1]), seed=1)",
    "orpheus": "from bench.gpu_server import write_checkpoint as w; w(Path(sys.argv[1]))",
    "pi05": "from bench.families.robots import write_checkpoint as w; w(Path(sys.argv[1]))",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request of the load: the body of a `POST /generate`, encoded once."""

    body: bytes
    content_type: str


def asks(tokens: int = 32) -> dict[str, Ask]:
    """Return one short request per model. tokens: most tokens of an answer in text."""
    cameras = {f"{number}.png": data for number, data in enumerate(images_of(224))}
    short = json.dumps({"max_output_tokens": tokens})
    text = {"text": "Describe the sea.", "output_modalities": "text", "model_kwargs": short}
    return {
        "omni": ask(text),
        "bagel": ask(text),
        "orpheus": ask({"text": "The sea is calm today.", "output_modalities": "audio"}),
        "pi05": ask({"text": TEXT, "robot_state": json.dumps(STATE)}, cameras),
    }


def ask(fields: Mapping[str, str], files: Mapping[str, bytes] | None = None) -> Ask:
    """Encode a form whose answer is a stream with its `done` line."""
    body = form({**fields, "streaming": "true", "stream_events": "full"}, tuple((files or {}).items()))
    return Ask(body=body, content_type=f"multipart/form-data; boundary={BOUNDARY}")


def write_weights(folder: Path, say: Callable[[str], None]) -> dict[str, Path]:
    """Write checkpoints of random weights in official shapes, all at once, each in a process of its own.

    Raises RuntimeError if one fails.
    """
    paths = {name: folder / name for name in MODELS}
    folder.mkdir(parents=True, exist_ok=True)
    running = {}
    for name, program in WRITERS.items():
        if not paths[name].exists():
            words = [sys.executable, "-c", f"import sys\nfrom pathlib import Path\n{program}", str(paths[name])]
            running[name] = subprocess.Popen(words, cwd=ROOT)
    codes = {name: process.wait() for name, process in running.items()}
    for name, code in codes.items():
        if code:
            raise RuntimeError(f"the checkpoint of {name} could not be written: exit {code}")
        say(f"{name}: checkpoint written, {sum(each.stat().st_size for each in paths[name].rglob('*')):,} bytes")
    return paths


def write_file(
    path: Path, *, port: int, device: str, is_tiny: bool, host_memory: str | None, weights: Mapping[str, Path]
) -> Path:
    """Write the gateway's serve.yaml."""
    host = host_memory or (TINY_HOST if is_tiny else HOST)
    lines = [f"port: {port}", "sleepable: true", f"memory: {{host: {host}}}", "models:"]
    for name, target in MODELS.items():
        lines += [
            f"  {name}:",
            f"    target: {target}{':tiny' if is_tiny else ''}",
            f"    device: {device}",
            f"    memory: {(TINY_BUDGETS if is_tiny else BUDGETS)[name]}",
            *([f"    weights: {weights[name]}"] if name in weights else []),
        ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
