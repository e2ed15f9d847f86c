"""Benchmark of a killed worker on one GPU: seconds until it is ready again, and the pause of streams that are resumed.

Run from the repository root: `python -m bench.gpu_restart [--models orpheus,qwen3_omni,bagel] [--out FILE]`. Weights
are random numbers in the official shapes (made on the device, but for Orpheus, whose are read from files), and kernels
are compiled. Each model is started with the standby process and without it; its worker gets SIGKILL once under
`--streams` streams of speech, then twice without load. A pause is the longest gap between chunks after the kill;
underruns count how often a player with a buffer of 1 or 2 s runs dry; repeats are the largest correlation of the sound
behind the pause with any sound before it, 1.0 for samples that come twice. Prints JSON. `--tiny --device cpu` tests
the benchmark itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bench.gpu_qwen3omni import CONFIGS
from bench.gpu_ready import SIDE, TINY_SIDE, Kind, kinds, timed, weights
from bench.serving.client import Heard, ask
from bench.serving.deployment import Plan, Served, gpu_state
from bench.serving.figures import head, summary
from bench.serving.options import add_deployment_options

DEPLOYMENT_FILES: Final = {"qwen3_omni": CONFIGS / "qwen3omni_single_gpu.yaml"}
RATE: Final = 24_000
"""Samples per second of the speech of all models."""

BUFFERS_S: Final = (1.0, 2.0)
BEHIND_S, BEFORE_S = 0.1, 1.0
"""Lengths of sound behind and before a pause in which repeated samples are searched."""

POLL_S: Final = 0.005
LIMIT_S: Final = 180.0
SPEECH: Final = {
    "orpheus": {"max_output_tokens": 1400},
    "qwen3_omni": {"max_output_tokens": 200, "talker_max_tokens": 250},
}
"""Parameters of the streams, which last about 20 s of playback."""

TINY_SPEECH: Final = {
    "orpheus": {"max_output_tokens": 700},
    "qwen3_omni": {"max_output_tokens": 40, "talker_max_tokens": 60},
}


@dataclass(frozen=True, slots=True)
class Player:
    """Playback of a stream that begins once `buffer_s` seconds of sound have come. stalled_s: sum of its underruns."""

    buffer_s: float
    underruns: int
    stalled_s: float

    @classmethod
    def of(cls, heard: Heard, buffer_s: float) -> Player:
        """Play the chunks of a stream at their arrival times."""
        began, stalled_s, underruns, received_s = None, 0.0, 0, 0.0
        for mark, samples in zip(heard.marks, heard.samples, strict=True):
            if began is not None:
                late_s = mark - began - stalled_s - received_s
                underruns += late_s > 0
                stalled_s += max(0.0, late_s)
            received_s += samples / RATE
            if began is None and received_s >= buffer_s:
                began = mark
        return cls(buffer_s, underruns, round(stalled_s, 3))


def main() -> int:
    """Measure, print and write the report."""
    options = read_options()
    scratch = Path(tempfile.mkdtemp(prefix="mr-", dir="/tmp"))
    report: dict[str, Any] = {**head(), "restarts": {}}
    errors = 0
    try:
        for model in options.models.split(","):
            folder = None if options.tiny else weights(model, scratch / model)
            for standby in options.standby.split(","):
                try:
                    figures = measured(options, scratch, model, folder, standby)
                except Exception as error:  # noqa: BLE001 isolation boundary: one deployment; the others are measured
                    figures, errors = {"error": str(error)[-4000:]}, errors + 1
                report["restarts"][f"{model}, standby {standby}"] = figures
                print(f"{model}, standby {standby}:", json.dumps(figures), flush=True)
                if options.out:
                    options.out.write_text(json.dumps(report, indent=1) + "\n")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return int(bool(errors))


def measured(
    options: argparse.Namespace, scratch: Path, model: str, folder: Path | None, standby: str
) -> dict[str, Any]:
    """Start a deployment, kill its worker and stop it. standby: `on` or `off`."""
    root = scratch / f"{model}-{standby}"
    root.mkdir()
    has_standby = standby == "on"
    plan = Plan(
        model=f"{model}:tiny" if options.tiny else model,
        device=options.device,
        port=options.port,
        root=root,
        weights=folder,
        settings=(f"standby={str(has_standby).lower()}", *options.set),
        environment={"TRITON_CACHE_DIR": str(scratch / "kernels")},
        config=None if options.tiny else {**DEPLOYMENT_FILES, **dict(options.config)}.get(model),
    )
    kind = next(iter(kinds(model, TINY_SIDE if options.tiny else SIDE).values()))
    with Served(plan) as served, served.telling(3000):
        figures: dict[str, Any] = {"up_s": round(served.ready_s, 2), "request_s": timed(options.port, kind, 1)}
        if model in SPEECH:  # first, because the supervisor delays the restarts of later deaths
            await_calm(served, has_standby=has_standby)
            params = (TINY_SPEECH if options.tiny else SPEECH)[model]
            speech = replace(kind, params={**kind.params, **params})
            figures["streams"] = asyncio.run(streamed(served, options, speech))
        figures["kills"] = [killed(served, options, kind, has_standby=has_standby) for _ in range(options.kills)]
        figures["gpu"] = gpu_state()
    return figures


def killed(served: Served, options: argparse.Namespace, kind: Kind, *, has_standby: bool) -> dict[str, Any]:
    """Kill the idle worker. Returns its seconds to ready and of two requests: at once and after the captures."""
    await_calm(served, has_standby=has_standby)
    figures = await_restart(served, options.worker, kill(served, options.worker))
    figures["requests_s"] = [timed(options.port, kind, 2)]
    served.wait_captured(quiet_s=4.0, limit_s=60)
    figures["requests_s"].append(timed(options.port, kind, 3))
    return figures


def await_calm(served: Served, *, has_standby: bool) -> None:
    """Wait until the deployment is ready, and its standby process too."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        snapshot = served.snapshot()
        standby = snapshot["children"].get("standby", {})
        if snapshot["deployment"]["state"] == "ready" and (not has_standby or standby.get("state") == "ready"):
            return
        time.sleep(0.2)
    raise TimeoutError("the deployment or its standby process is not ready")


def kill(served: Served, name: str) -> tuple[int, float]:
    """Kill a worker. Returns its incarnation and the time."""
    worker = served.snapshot()["children"][name]
    os.kill(worker["pid"], signal.SIGKILL)
    return worker["incarnation"], time.monotonic()


def await_restart(served: Served, name: str, killing: tuple[int, float]) -> dict[str, Any]:
    """Wait for the next incarnation. Returns its seconds to ready, by phase, and the supervisor's delay in them."""
    before, killed_s = killing
    while True:
        worker = served.snapshot()["children"][name]
        if worker["incarnation"] > before and worker["state"] == "ready":
            break
        if time.monotonic() > killed_s + LIMIT_S:
            raise TimeoutError(f"{name} is not ready {LIMIT_S:g} s after its death: {worker}")
        time.sleep(POLL_S)
    ready_s = time.monotonic() - killed_s
    events = [json.loads(line) for path in served.plan.root.rglob("events.ndjson") for line in path.open()]
    mine = [event for event in events if event.get("child") == name]
    delays = [event["after_s"] for event in mine if event["type"] == "child.restarting"]
    spawned = [event for event in mine if event["type"] == "child.spawned"]
    return {
        "ready_s": round(ready_s, 3),
        "delay_s": delays[-1],
        "without_delay_s": round(ready_s - delays[-1], 3),
        "phases_s": worker["phases_s"],
        "was_standby": spawned[-1].get("standby", False),
    }


async def streamed(served: Served, options: argparse.Namespace, kind: Kind) -> dict[str, Any]:
    """Kill the worker under load, once every stream has begun. Returns the restart, pauses and underruns."""
    bodies = [kind.body(seed) for seed in range(10, 10 + options.streams)]
    asking = [asyncio.create_task(ask(options.port, body, limit_s=LIMIT_S, keeps_sound=True)) for body in bodies]
    await asyncio.sleep(options.kill_after)
    killing = await asyncio.to_thread(kill, served, options.worker)
    restart = await asyncio.to_thread(await_restart, served, options.worker, killing)
    heard = await asyncio.gather(*asking)
    whole = [each for each in heard if each.is_done]
    pauses = [pause_s(each, killing[1]) for each in whole]
    cut = [each for each, pause in zip(whole, pauses, strict=True) if pause is not None]
    players = {f"{size:g}": [Player.of(each, size) for each in cut] for size in BUFFERS_S}
    return {
        "streams": options.streams,
        "whole": len(whole),
        "codes": sorted({each.code for each in heard if each.code}),
        "in_flight_at_kill": len(cut),
        "restart": restart,
        "pause": summary([pause for pause in pauses if pause is not None], "s") if cut else None,
        "repeats": max((repeated(each, killing[1]) for each in cut), default=None),
        "playback_s": summary([sum(each.samples) / RATE for each in whole], "s") if whole else None,
        "with_underruns": {size: sum(bool(each.underruns) for each in played) for size, played in players.items()},
        "stalled_s": {size: [each.stalled_s for each in played] for size, played in players.items()},
    }


def pause_s(heard: Heard, killed_s: float) -> float | None:
    """Return the longest gap between chunks that ends after the kill; None for a stream that had ended."""
    gaps = [later - earlier for earlier, later in pairwise(heard.marks) if later > killed_s]
    return max(gaps, default=None)


def repeated(heard: Heard, killed_s: float) -> float:
    """Return the largest normalised correlation of the sound behind the pause with a part of the sound before it."""
    gaps = [
        (later - earlier, number)
        for number, (earlier, later) in enumerate(pairwise(heard.marks), 1)
        if later > killed_s
    ]
    _, first = max(gaps)
    sound = np.frombuffer(heard.sound, dtype="<i2").astype(np.float64)
    cut = sum(heard.samples[:first])
    behind = sound[cut : cut + int(BEHIND_S * RATE)]
    return largest_correlation(behind, sound[max(0, cut - int(BEFORE_S * RATE)) : cut])


def largest_correlation(part: npt.NDArray[np.float64], sound: npt.NDArray[np.float64]) -> float:
    """Return the largest normalised correlation of `part` with a part of `sound` of its length; 0.0 without any."""
    if not len(part) or len(sound) < len(part):
        return 0.0
    products = np.correlate(sound, part, mode="valid")
    squares = np.concatenate(([0.0], np.cumsum(sound**2)))
    energies = (squares[len(part) :] - squares[: -len(part)]) * (part @ part)
    return round(float(np.max(products / np.sqrt(np.maximum(energies, 1e-12)))), 4)


def model_file(text: str) -> tuple[str, Path]:
    """Read MODEL=FILE."""
    model, _, file = text.partition("=")
    return model, Path(file)


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="orpheus,qwen3_omni,bagel")
    parser.add_argument("--standby", default="on,off", help="of on and off, in this order")
    parser.add_argument("--config", action="append", default=[], type=model_file, help="MODEL=FILE, a deployment file")
    parser.add_argument("--worker", default="worker-0", help="the worker to kill")
    parser.add_argument("--kills", type=int, default=2, help="kills without load")
    parser.add_argument("--streams", type=int, default=8, help="streams at the kill under load")
    parser.add_argument("--kill-after", type=float, default=2.0, help="seconds after the start of the streams")
    add_deployment_options(parser, 18127)
    return parser.parse_args()


if __name__ == "__main__":
    started_s = time.monotonic()
    code = main()
    print(f"{time.monotonic() - started_s:.0f} s")
    sys.exit(code)
