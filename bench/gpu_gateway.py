"""Four models behind one gateway on one GPU that does not hold them together: wakes and first bytes under a mixed load.

Run from the repository root on a machine with one GPU: `python bench/gpu_gateway.py --minutes 10 --out FILE`.
Qwen3-Omni, BAGEL, Orpheus and Pi0.5 in official shapes with random weights share the GPU by budgets. First, one
client starts each model and then asks all of them in turn, twice, so that every model is woken. Then clients choose a
model at random and stay with it for a few requests. The report has the first bytes of requests that started a model,
woke it from a sleep of level 1 or 2, waited for one that another request had started, or met it awake; the wakes per
minute; the memory after each step of the first phase; and the time that the gateway adds to a first byte: each pair
asks an awake deployment directly and through the gateway, by turns. `--tiny --device cpu` tests the benchmark itself,
with faked memory.
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
from mstar_core.host.hardware.memory import memory_facts

MODELS: Final = {"omni": "qwen3_omni", "bagel": "bagel", "orpheus": "orpheus", "pi05": "pi05"}
BUDGETS: Final = {"omni": "85GiB", "bagel": "44GiB", "orpheus": "24GiB", "pi05": "16GiB"}
"""Budgets on a GPU of 141 GB (140.4 GiB): weights of 66, 28, 6 and 7 GiB with their caches and graphs.

Qwen3-Omni and BAGEL leave room for what the others keep while they sleep, and for none of the others awake.
"""

HOST: Final = "84GiB"
"""Host memory for sleeping models, counted by their budgets: all but Qwen3-Omni keep their weights there, 41 GiB."""

TINY_BUDGETS: Final = {"omni": "900MiB", "bagel": "700MiB", "orpheus": "600MiB", "pi05": "500MiB"}
TINY_HOST: Final = "1800MiB"
FAKE: Final = "cpu:0=2GiB"
ROUNDS: Final = 2
"""Turns of the first phase in which each model is asked, after all were started."""

ADDED: Final = ("pi05", "bagel")
"""Models of which the added first byte is measured: with images in the request, and with a text alone."""

STARTED: Final = "start"


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
    host = options.host_memory or (TINY_HOST if options.tiny else HOST)
    lines = [f"port: {options.port}", "sleepable: true", f"memory: {{host: {host}}}", "models:"]
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
    """The load on a gateway. Owned by one run. errors: of requests, by their model."""

    def __init__(self, options: argparse.Namespace, figures: Figures) -> None:
        self._options = options
        self._figures = figures
        self._url = f"http://127.0.0.1:{options.port}"
        self._asks = asks()
        socket = Path(options.environment["MSTAR_RUNTIME_DIR"]) / ".gateways" / "gateway" / "admin.sock"
        self._admin = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(socket)), base_url="http://gateway")
        self.errors: list[str] = []

    async def run(self) -> dict[str, Any]:
        """Send requests until the time is over. Returns counts."""
        limits = httpx.Limits(max_connections=64)
        async with self._admin, httpx.AsyncClient(timeout=900.0, limits=limits) as client:
            began = time.perf_counter()
            steps = [await self._step(client, name) for _ in range(1 + ROUNDS) for name in MODELS]
            before, mixed_at = await self._models(), time.perf_counter()
            until = began + 60 * self._options.minutes
            await asyncio.gather(*(self._client(client, seed, until) for seed in range(self._options.clients)))
            took_s, after = time.perf_counter() - mixed_at, await self._models()
            for name in ADDED:
                await self._added(client, name)
        mixed = {name: after[name]["wakes"] - before[name]["wakes"] for name in MODELS}
        return {
            "steps": steps,
            "mixed_s": round(took_s, 1),
            "mixed_wakes": mixed,
            "mixed_loads": {name: after[name]["loads"] - before[name]["loads"] for name in MODELS},
            "mixed_wakes_per_minute": round(60 * sum(mixed.values()) / took_s, 2) if took_s >= 1 else None,
            "errors": self.errors[:20],
            "error_count": len(self.errors),
            "models": after,
        }

    async def _step(self, client: httpx.AsyncClient, name: str) -> dict[str, Any]:
        """Ask one model alone. Returns what it took, with the states and the memory after it."""
        kind, first_s = await self._ask(client, name)
        models = await self._models()
        print(f"{name}: {kind}, first byte after {first_s} s", file=sys.stderr, flush=True)
        return {
            "model": name,
            "met": kind,
            "first_byte_s": first_s,
            "states": {each: f"{item['state']} {item['sleep_level'] or ''}".strip() for each, item in models.items()},
            "held": {each: item["held"] for each, item in models.items()},
            "gpu_bytes": gpu_state().get("memory_bytes"),
            "host_free_bytes": memory_facts().get("MemAvailable"),
        }

    async def _client(self, client: httpx.AsyncClient, seed: int, until: float) -> None:
        draw = random.Random(seed)
        while time.perf_counter() < until:
            name = draw.choice(list(MODELS))
            for _ in range(draw.randint(1, 6)):
                _, first_s = await self._ask(client, name)
                if first_s is None:
                    await asyncio.sleep(1.0)

    async def _ask(self, client: httpx.AsyncClient, name: str) -> tuple[str, float | None]:
        """Send one request. Returns what it met, and the time to its first byte in seconds; None for an error."""
        kind = met((await self._models())[name])
        try:
            first_s = await self._first_byte(client, f"{self._url}/m/{name}", self._asks[name])
        except (httpx.HTTPError, RuntimeError) as error:
            self.errors.append(f"{name}: {error}")
            return kind, None
        self._figures.add(f"first_byte_{kind}_{name}", [first_s])
        self._figures.add(f"first_byte_{kind}", [first_s])
        return kind, round(first_s, 4)

    async def _first_byte(self, client: httpx.AsyncClient, url: str, ask: Ask) -> float:
        began = time.perf_counter()
        data = {**ask.fields, "streaming": "true"}
        async with client.stream("POST", f"{url}/generate", data=data, files=list(ask.files) or None) as answer:
            if answer.status_code != 200:
                said = (await answer.aread()).decode("utf-8", "replace")
                raise RuntimeError(f"status {answer.status_code}: {said[:300]}")
            first_s = 0.0
            async for _ in answer.aiter_raw():
                first_s = first_s or time.perf_counter() - began
        return first_s

    async def _models(self) -> dict[str, dict[str, Any]]:
        """Return the models of the gateway with their states, wakes and the memory that they hold."""
        answer = await self._admin.get("/v1/models")
        return {item["name"]: item for item in answer.json()["items"] if item["name"] in MODELS}

    async def _added(self, client: httpx.AsyncClient, name: str) -> None:
        """Measure a model directly and through the gateway, by turns, the first of a pair alternating."""
        through, ask = f"{self._url}/m/{name}", self._asks[name]
        try:
            await self._first_byte(client, through, ask)
            urls = {"gateway": through, "direct": deployment_url(self._options, name)}
            for number in range(self._options.pairs):
                order = list(urls) if number % 2 else list(urls)[::-1]
                took = {way: await self._first_byte(client, urls[way], ask) for way in order}
                self._figures.add(f"added_first_byte_{name}", [took["gateway"] - took["direct"]])
                for way, first_s in took.items():
                    self._figures.add(f"pair_{way}_{name}", [first_s])
        except (httpx.HTTPError, RuntimeError, OSError) as error:
            self.errors.append(f"{name}, pairs: {error}")


def met(item: Mapping[str, Any]) -> str:
    """Return what a request meets: a model that is awake, loads or wakes, sleeps at a level, or must be started.

    One that is being put to sleep has no level yet.
    """
    match item["state"]:
        case "ready" | "idle":
            return "awake"
        case "sleeping":
            return f"wake_{item['sleep_level']}" if item["sleep_level"] else "falling_asleep"
        case "loading":
            return "loading"
        case _:
            return STARTED


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
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the load, its first phase included")
    parser.add_argument("--clients", type=int, default=4, help="clients at once")
    parser.add_argument("--pairs", type=int, default=100, help="pairs of requests for the added first byte")
    parser.add_argument("--port", type=int, default=8650, help="port of the gateway")
    parser.add_argument("--host-memory", help=f"host memory for sleeping models; default {HOST}")
    parser.add_argument("--device", default="cuda", help="device of all models")
    parser.add_argument("--folder", type=Path, help="folder of the checkpoints; written there, and kept")
    parser.add_argument("--tiny", action="store_true", help="embedded checkpoints and faked memory")
    parser.add_argument("--out", type=Path, help="file of the report")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
