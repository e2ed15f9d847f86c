"""V-JEPA 2 and 2-AC over HTTP: clips to features, rollouts of one and of many candidates.

As a program it writes a checkpoint in the official shapes with random weights: `python -m bench.families.clip_requests
vjepa2 FOLDER`.
"""

from __future__ import annotations

import concurrent.futures
import io
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from bench.families.sections import Sections
from bench.serving.deployment import Plan, Served, gpu_state
from bench.serving.figures import ROOT, Figures
from bench.serving.watch import note_stations, watched
from mstar_vjepa2.checkpoint.config import RELEASED_AC, released
from mstar_vjepa2.published import PublishedWeights, action_weights, base_weights

HAS_VIDEO: Final = find_spec("av") is not None
"""Whether PyAV is installed. Without it no video can be encoded, or decoded by the server."""

FRAMES: Final = "application/x-mstar-frames"
"""Media type of binary frames, without base64."""

QUIET_S: Final = 4.0
"""Seconds without a capture until captures count as complete. Compilations between captures may take three seconds."""

STATE: Final = [0.3, 0.0, 0.2, 3.1, 0.0, 0.0, 0.5]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load of a benchmark. alone: sequential requests. clients: concurrent clients with `each` requests per client."""

    alone: int
    clients: int
    each: int
    is_tiny: bool

    @property
    def crop(self) -> int:
        """Side of a frame in pixels."""
        return 32 if self.is_tiny else 256

    @property
    def clip(self) -> int:
        """Frames of a clip."""
        return 8 if self.is_tiny else 64

    @property
    def many(self) -> tuple[int, ...]:
        """Numbers of candidates."""
        return (4, 12) if self.is_tiny else (64, 400)

    @property
    def planned(self) -> int:
        """Candidates of a planning step. More than can be scored step by step, so they run in groups."""
        return 24 if self.is_tiny else 800


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A kind of request. files: name, bytes and type of each."""

    params: Mapping[str, Any]
    files: tuple[tuple[str, bytes, str], ...]
    outputs: str = "tensor"


@dataclass(slots=True)
class Asked:
    """Result of a request. first_s: time to the first value; whole_s: time to the last byte; size_bytes:
    response size.
    """

    first_s: float = 0.0
    whole_s: float = 0.0
    size_bytes: int = 0
    usage: dict[str, Any] = field(default_factory=dict)


def served(
    load: Load,
    *,
    model: str,
    device: str,
    port: int,
    scratch: Path,
    folder: Path | None,
    figures: Figures,
    sections: Sections,
) -> dict[str, Any]:
    """Start a deployment, send requests of each kind until nothing more is captured, measure, and stop it."""
    weights = None
    if not load.is_tiny:
        weights = (folder or scratch) / model
        if not weights.exists():
            subprocess.run(
                [sys.executable, "-m", "bench.families.clip_requests", model, str(weights)], cwd=ROOT, check=True
            )
    root = scratch / f"run-{model}"
    root.mkdir()
    plan = Plan(model=f"{model}:tiny" if load.is_tiny else model, device=device, port=port, root=root, weights=weights)
    kinds = clip_kinds(load) if model == "vjepa2" else rollout_kinds(load)
    with Served(plan) as running:
        begun, answers = running.snapshot(), dict[str, Any]()
        for name, ask in kinds.items():
            label = f"server_{model}_{name}"
            sections.run(label, partial(_measured, running, load, label, ask, figures, answers))
        return {
            "has_video": HAS_VIDEO,
            "ready_s": round(running.ready_s, 2),
            "phases_s": begun["deployment"]["phases_s"],
            "answers": answers,
            "resident_bytes": running.resident_bytes(),
            "cpu_s": running.cpu_s(),
            "gpu_at_end": gpu_state(),
            "held": running.wait_clean(),
            "values": {name: value for name, value in running.values().items() if "graph" in name},
        }


def _measured(
    running: Served, load: Load, label: str, ask: Ask, figures: Figures, answers: dict[str, Any]
) -> dict[str, Any]:
    """Measure one kind of request, warm: sequentially, then with concurrent clients. Raises with the logs' ends."""
    with running.telling():
        return _asked(running, load, label, ask, figures, answers)


def _asked(
    running: Served, load: Load, label: str, ask: Ask, figures: Figures, answers: dict[str, Any]
) -> dict[str, Any]:
    port = running.plan.port
    for _ in range(2):
        _one_by_one(port, ask, 2)
        _at_once(port, ask, load.clients, 1)
        captured = running.wait_captured(quiet_s=QUIET_S, limit_s=60)
    before = running.captures()
    with watched(running, figures, f"{label}_alone") as spent:
        alone = _one_by_one(port, ask, load.alone)
    note_stations(running, figures, f"{label}_alone", load.alone)
    figures.add(f"{label}_alone", [each.whole_s for each in alone])
    figures.add(f"{label}_alone_first", [each.first_s for each in alone])
    start = time.monotonic()
    crowd = _at_once(port, ask, load.clients, load.each)
    span = time.monotonic() - start
    figures.add(f"{label}_clients_{load.clients}", [each.whole_s for each in crowd])
    figures.add(f"{label}_per_s_clients_{load.clients}", [len(crowd) / span], "1/s")
    answers[label] = {"bytes": alone[0].size_bytes, "usage": alone[0].usage}
    return {"captured": captured, "captured_while_measured": running.captures() != before, "alone": spent}


def clip_kinds(load: Load) -> dict[str, Ask]:
    """Return clips as video (with PyAV) and as pixels, to one vector and to all vectors."""
    file = io.BytesIO()
    pixels = np.random.default_rng(2).integers(0, 256, (load.clip, 3, load.crop, load.crop), dtype=np.uint8)
    np.save(file, pixels)
    tensor = (("clip.npy", file.getvalue(), "application/octet-stream"),)
    one: dict[str, Any] = {"task": "encode", "pooling": "mean"}
    found = {
        "pixels_mean": Ask(params=one, files=tensor),
        "pixels_all": Ask(params={"task": "encode", "output_dtype": "bfloat16"}, files=tensor),
    }
    if HAS_VIDEO:
        found["video_mean"] = Ask(params=one, files=(("clip.mp4", film(load), "video/mp4"),))
    return found


def rollout_kinds(load: Load) -> dict[str, Ask]:
    """Return rollouts of thirty steps, streamed and final only; scored rollouts of many candidates; a plan."""
    file = io.BytesIO()
    side = np.random.default_rng(3).integers(0, 256, (load.crop, load.crop, 3), dtype=np.uint8)
    Image.fromarray(side).save(file, "PNG")
    image = ("frame.png", file.getvalue(), "image/png")
    steps = 4 if load.is_tiny else 30
    generator = np.random.default_rng(4)

    def params(candidates: int, horizon: int, **more: Any) -> dict[str, Any]:
        moves = (generator.standard_normal((candidates, horizon, 7)) * 0.02).round(4)
        return {"task": "rollout", "actions": moves.tolist(), "states": [STATE], **more}

    long = params(1, steps)
    found = {
        "steps": Ask(params=long, files=(image,)),
        "last_frame": Ask(params={**long, "return": ["final_only"]}, files=(image,)),
    }
    for count in load.many:
        found[f"candidates_{count}"] = Ask(params=params(count, 2), files=(image, image), outputs="tensor,scalar")
    plan = {"task": "plan", "states": [STATE], "samples": load.planned, "horizon": 2, "cem_steps": 2}
    found[f"plan_{load.planned}"] = Ask(params=plan, files=(image, image))
    return found


def film(load: Load) -> bytes:
    """Encode an H.264 clip of moving noise."""
    import av

    file, generator = io.BytesIO(), np.random.default_rng(1)
    base = generator.integers(0, 256, (load.crop * 2, load.crop * 2, 3), dtype=np.uint8)
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=16)
        stream.width = stream.height = load.crop * 2
        stream.pix_fmt = "yuv420p"
        for number in range(load.clip):
            frame = av.VideoFrame.from_ndarray(np.roll(base, 4 * number, axis=1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def _one_by_one(port: int, ask: Ask, count: int) -> list[Asked]:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
        return [_ask(client, ask) for _ in range(count)]


def _at_once(port: int, ask: Ask, clients: int, each: int) -> list[Asked]:
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        loads = pool.map(lambda _: _one_by_one(port, ask, each), range(clients))
        return [one for load in loads for one in load]


def _ask(client: httpx.Client, ask: Ask) -> Asked:
    """Send one request with binary streaming. Raises RuntimeError for an error response."""
    files = [("files", each) for each in ask.files]
    fields = {"model_kwargs": json.dumps(ask.params), "output_modalities": ask.outputs, "streaming": "true"}
    found, reader, start = Asked(), _Frames(), time.monotonic()
    with client.stream("POST", "/generate", data=fields, files=files, headers={"Accept": FRAMES}) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"the server answered {answer.status_code}: {answer.read()[:500]!r}")
        for chunk in answer.iter_raw():
            found.size_bytes += len(chunk)
            for head in reader.feed(chunk):
                if head["modality"] in ("tensor", "scalar"):
                    found.first_s = found.first_s or time.monotonic() - start
                elif head["modality"] == "error":
                    raise RuntimeError(f"the request failed: {head}")
                elif head["modality"] == "done":
                    found.usage = head.get("metadata", {}).get("usage", {})
    found.whole_s = time.monotonic() - start
    return found


class _Frames:
    """Parser of a binary stream: u32 and u64 lengths, head, payload. Payloads are skipped."""

    def __init__(self) -> None:
        self._held, self._skipped = bytearray(), 0

    def feed(self, chunk: bytes) -> list[dict[str, Any]]:
        """Return the heads of payloads that are complete with this chunk."""
        self._held += chunk
        found = []
        while len(self._held) >= 12:
            head, payload = int.from_bytes(self._held[:4], "little"), int.from_bytes(self._held[4:12], "little")
            if len(self._held) < 12 + head + payload:
                break
            told = json.loads(self._held[12 : 12 + head])
            if told["modality"] == "error":
                told["said"] = self._held[12 + head : 12 + head + payload].decode(errors="replace")
            found.append(told)
            del self._held[: 12 + head + payload]
        return found


# -- checkpoints -----------------------------------------------------------------------------------------------------


def write_checkpoint(model: str, folder: Path, device: str = "cuda") -> Path:
    """Write random bfloat16 weights in the official shapes and names: ViT-L of V-JEPA 2, or V-JEPA 2-AC."""
    generator = torch.Generator(device).manual_seed(1)
    shapes = checkpoint_shapes(model)
    weights = {name: _drawn(name, shape, generator, device).cpu() for name, shape in shapes.items()}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[model]()))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def checkpoint_shapes(model: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of every published tensor of a model, by name."""
    return WEIGHTS[model]().shapes()


def _base_config() -> dict[str, Any]:
    vit = released("vitl").encoder.vit
    return {
        "model_type": "vjepa2",
        "hidden_size": vit.width,
        "num_hidden_layers": vit.layers,
        "num_attention_heads": vit.heads,
        "mlp_ratio": 4.0,
    }


def _action_config() -> dict[str, Any]:
    own, vit = RELEASED_AC.predictor, RELEASED_AC.encoder.vit
    return {
        "model_type": "vjepa2_ac",
        "encoder": {
            "hidden_size": vit.width,
            "num_hidden_layers": vit.layers,
            "num_attention_heads": vit.heads,
            "mlp_ratio": vit.inner / vit.width,
        },
        "ac_predictor": {
            "predictor_embed_dim": own.width,
            "depth": own.layers,
            "num_heads": own.heads,
            "mlp_ratio": own.inner / own.width,
            "use_extrinsics": False,
            "max_latent_frames": 32,
        },
    }


CONFIGS: Final = {"vjepa2": _base_config, "vjepa2_ac": _action_config}
WEIGHTS: Final[Mapping[str, Callable[[], PublishedWeights]]] = {
    "vjepa2": lambda: base_weights(released("vitl")),
    "vjepa2_ac": lambda: action_weights(RELEASED_AC),
}


def _drawn(name: str, shape: tuple[int, ...], generator: torch.Generator, device: str) -> torch.Tensor:
    """Draw a tensor: scale-preserving matrices, unit norm weights, zero biases."""
    made = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    if len(shape) > 1:
        return made.normal_(0.0, made[0].numel() ** -0.5, generator=generator)
    return made.fill_(1.0) if "norm" in name and name.endswith("weight") else made


if __name__ == "__main__":
    place = Path(sys.argv[2])
    try:
        write_checkpoint(sys.argv[1], place, "cuda" if torch.cuda.is_available() else "cpu")
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
