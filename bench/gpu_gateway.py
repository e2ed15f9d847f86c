"""Four models behind one gateway on one GPU that does not hold them together: wakes and first bytes under a mixed load.

Run from the repository root on a machine with one GPU: `python bench/gpu_gateway.py --minutes 10 --out FILE`.
Qwen3-Omni, BAGEL, Orpheus and Pi0.5 in official shapes with random weights share the GPU by budgets. Clients choose a
model at random and stay with it for a few requests. The report has wakes per minute, the wait of requests that met a
sleeping or absent model, first bytes of the others, and the time that the gateway adds to a first byte: each pair asks
an awake deployment directly and through the gateway, in turn. `--tiny --device cpu` tests the benchmark itself, with
faked memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from bench.robot_requests import STATE, TEXT, images_of
from bench.serving.deployment import gpu_state
from bench.serving.figures import ROOT, Figures, head, write

MODELS: Final = {"omni": "qwen3_omni", "bagel": "bagel", "orpheus": "orpheus", "pi05": "pi05"}
BUDGETS: Final = {"omni": "88GiB", "bagel": "46GiB", "orpheus": "24GiB", "pi05": "16GiB"}
"""Budgets on a GPU of 141 GB: the four take more than it has."""

TINY_BUDGETS: Final = {"omni": "900MiB", "bagel": "700MiB", "orpheus": "600MiB", "pi05": "500MiB"}
FAKE: Final = "cpu:0=2GiB"
COLD: Final = ("absent", "loading", "sleeping", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request of the mixed load: fields and files of `/generate`."""

    fields: Mapping[str, str]
    files: tuple[tuple[str, tuple[str, bytes]], ...] = ()


def asks() -> dict[str, Ask]:
    """Return one short request per model."""
    cameras = tuple(("files", (f"{number}.png", data)) for number, data in enumerate(images_of(224)))
    short = json.dumps({"max_output_tokens": 32})
    return {
        "omni": Ask(fields={"text": "Describe the sea.", "output_modalities": "text", "model_kwargs": short}),
        "bagel": Ask(fields={"text": "Describe the sea.", "output_modalities": "text", "model_kwargs": short}),
        "orpheus": Ask(fields={"text": "The sea is calm today.", "output_modalities": "audio"}),
        "pi05": Ask(fields={"text": TEXT, "robot_state": json.dumps(STATE)}, files=cameras),
    }


def write_weights(folder: Path) -> dict[str, Path]:
    """Write checkpoints of random weights in official shapes, each in a process of its own."""
    programs = {
        "omni": "from bench.families.omni_checkpoint import write_random as w; w(Path(sys.argv[1]), seed=1)",
        "bagel": "from bench.families.bagel_checkpoint import write_random as w; w(Path(sys.argv[1]), seed=1)",
        "orpheus": "from bench.gpu_server import write_checkpoint as w; w(Path(sys.argv[1]))",
    }
    made = {}
    for name in MODELS:
        path = made[name] = folder / name
        if path.exists():
            continue
        body = ["-c", f"import sys\nfrom pathlib import Path\n{programs[name]}"] if name in programs else None
        command = [sys.executable, *(body or ["-m", "bench.families.robots"]), str(path)]
        subprocess.run(command, cwd=ROOT, check=True)
    return made


def write_file(options: argparse.Namespace, folder: Path, weights: Mapping[str, Path]) -> Path:
    """Write the gateway's serve.yaml."""
    lines = [f"port: {options.port}", "sleepable: true", "models:"]
    for name, target in MODELS.items():
        lines += [
            f"  {name}:",
            f"    target: {target}{':tiny' if options.tiny else ''}",
            f"    device: {options.device}",
            f"    memory: {(TINY_BUDGETS if options.tiny else BUDGETS)[name]}",
            *([f"    weights: {weights[name]}"] if name in weights else []),
        ]
    path = folder / "serve.yaml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


class Load:
    """The mixed load on a gateway. Owned by one run. seconds: of the load."""

    def __init__(self, options: argparse.Namespace, figures: Figures) -> None:
        self._options = options
        self._figures = figures
        self._url = f"http://127.0.0.1:{options.port}"
        self._asks = asks()
        self.errors: list[str] = []

    async def run(self) -> dict[str, Any]:
        """Send requests until the time is over. Returns counts."""
        async with httpx.AsyncClient(timeout=900.0, limits=httpx.Limits(max_connections=64)) as client:
            before, began = gateway_models(self._options), time.perf_counter()
            until = began + 60 * self._options.minutes
            await asyncio.gather(*(self._client(client, seed, until) for seed in range(self._options.clients)))
            took_s = time.perf_counter() - began
            after = gateway_models(self._options)
            await self._added(client)
        wakes = {name: int(after[name]["wakes"]) - int(before[name]["wakes"]) for name in MODELS}
        return {
            "load_s": round(took_s, 1),
            "wakes": wakes,
            "wakes_per_minute": round(60 * sum(wakes.values()) / took_s, 2),
            "errors": self.errors[:20],
            "models": after,
        }

    async def _client(self, client: httpx.AsyncClient, seed: int, until: float) -> None:
        draw = random.Random(seed)
        while time.perf_counter() < until:
            name = draw.choice(list(MODELS))
            for _ in range(draw.randint(1, 6)):
                state = (await self._models(client))[name]["state"]
                kind = "cold" if state in COLD else "warm"
                try:
                    first_s = await self._first_byte(client, f"{self._url}/m/{name}", self._asks[name])
                except (httpx.HTTPError, RuntimeError) as error:
                    self.errors.append(f"{name}: {error}")
                    await asyncio.sleep(1.0)
                    continue
                self._figures.add(f"first_byte_{kind}_{name}", [first_s])
                self._figures.add("wait_of_cold" if kind == "cold" else "first_byte_warm", [first_s])

    async def _first_byte(self, client: httpx.AsyncClient, url: str, ask: Ask) -> float:
        began = time.perf_counter()
        data = {**ask.fields, "streaming": "true"}
        async with client.stream("POST", f"{url}/generate", data=data, files=list(ask.files) or None) as answer:
            first_s = 0.0
            async for _ in answer.aiter_raw():
                first_s = first_s or time.perf_counter() - began
            if answer.status_code != 200:
                raise RuntimeError(f"status {answer.status_code}")
        return first_s

    async def _models(self, client: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
        answer = await client.get(f"{self._url}/v1/models")
        return {item["id"]: item for item in answer.json()["data"] if item["id"] in MODELS}

    async def _added(self, client: httpx.AsyncClient) -> None:
        """Measure Pi0.5 directly and through the gateway, in turn."""
        ask, found = self._asks["pi05"], self._options.pairs
        await self._first_byte(client, f"{self._url}/m/pi05", ask)
        direct = deployment_url(self._options, "pi05")
        differences = []
        for _ in range(found):
            through_s = await self._first_byte(client, f"{self._url}/m/pi05", ask)
            direct_s = await self._first_byte(client, direct, ask)
            differences.append(through_s - direct_s)
        self._figures.add("added_first_byte", differences)


def gateway_models(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the models of the gateway with their wakes and the memory that they hold."""
    command = [*MSTARCTL, "serve", "ls", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=options.environment)
    return {item["name"]: item for item in json.loads(done.stdout)["items"]}


def deployment_url(options: argparse.Namespace, name: str) -> str:
    """Return the address of a deployment's own api, from its record."""
    record = Path(options.environment["MSTAR_RUNTIME_DIR"]) / name / "spec.json"
    return f"http://127.0.0.1:{json.loads(record.read_bytes())['api']['port']}"


MSTARCTL: Final = (sys.executable, "-m", "mstarctl")


def main() -> int:
    """Start the gateway, run the load, write and print the report. Returns 1 if a request failed."""
    options = read_options()
    scratch = Path(tempfile.mkdtemp(prefix="mg-", dir="/tmp"))
    figures, report = Figures(), {**head(), "models": MODELS, "budgets": TINY_BUDGETS if options.tiny else BUDGETS}
    (scratch / "run").mkdir(mode=0o700)
    environment = {**os.environ, "MSTAR_RUNTIME_DIR": str(scratch / "run"), "XDG_STATE_HOME": str(scratch / "state")}
    if options.tiny:
        environment["MSTAR_FAKE_MEMORY"] = FAKE
    options.environment = environment
    try:
        weights = {} if options.tiny else write_weights(options.folder or scratch / "weights")
        file = write_file(options, scratch, weights)
        subprocess.run([*MSTARCTL, "serve", str(file), "-d"], check=True, env=environment, cwd=ROOT)
        try:
            report["load"] = asyncio.run(Load(options, figures).run())
            report["gpu"] = gpu_state()
        finally:
            subprocess.run([*MSTARCTL, "serve", "down"], check=False, env=environment, cwd=ROOT)
            subprocess.run([*MSTARCTL, "down", "--all"], check=False, env=environment, cwd=ROOT)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report["figures"] = figures.summary()
    if options.out is not None:
        write(report, figures.samples, options.out)
    print(json.dumps(report, indent=1), flush=True)
    return int(bool(report["load"]["errors"]))


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the load")
    parser.add_argument("--clients", type=int, default=4, help="clients at once")
    parser.add_argument("--pairs", type=int, default=100, help="pairs of requests for the added first byte")
    parser.add_argument("--port", type=int, default=8650, help="port of the gateway")
    parser.add_argument("--device", default="cuda", help="device of all models")
    parser.add_argument("--folder", type=Path, help="folder of the checkpoints; written there, and kept")
    parser.add_argument("--tiny", action="store_true", help="embedded checkpoints and faked memory")
    parser.add_argument("--out", type=Path, help="file of the report")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
