"""Four models behind one gateway on one GPU that does not hold them together: wakes and first bytes under a mixed load.

Run from the repository root on a machine with one GPU:
`python bench/gpu_gateway.py --deadline 560 --out FILE --logs FOLDER`.

Qwen3-Omni, BAGEL, Orpheus and Pi0.5 in official shapes with random weights share the GPU by budgets. The phases: their
checkpoints are written, two models start at once, then the other two; one client asks all models in turn, so that each
is woken; pairs of requests, one directly and one through the gateway, give the time that the gateway adds to a first
byte of an awake model; streams give its processor time per piece; then clients choose a model at random and stay with
it for a few requests. The report has the first bytes by what a request met (a start, a wake from a level, an awake
model), the wakes with their wait for room, the sleeps, the lost requests, gaps in the sound, and the memory over time.
It is written after each phase. Each event is a line with its second on stderr. `--deadline` shortens the mixed load.
`--tiny --device cpu` tests the benchmark itself, with faked memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from bench.gateway.load import Load
from bench.gateway.logs import by_model, copy_logs, events, moves
from bench.gateway.models import BUDGETS, FAKE, MODELS, TINY_BUDGETS, write_file, write_weights
from bench.gateway.watch import Watch
from bench.serving.deployment import gpu_state
from bench.serving.figures import ROOT, Figures, head, write

MSTARCTL: Final = (sys.executable, "-m", "mstarctl")
STOP_S: Final = 40.0
"""Time of a deadline that is left for the end: logs, and the stop of the gateway and its deployments."""

SERVE_S: Final = 120.0


class Run:
    """One run with its folder and report."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._began = time.perf_counter()
        self._scratch = Path(tempfile.mkdtemp(prefix="mg-", dir="/tmp"))
        self._run_dir, self._state_dir = self._scratch / "run", self._scratch / "state" / "mstar"
        self._run_dir.mkdir(mode=0o700)
        self._environment = {
            **os.environ,
            "MSTAR_RUNTIME_DIR": str(self._run_dir),
            "XDG_STATE_HOME": str(self._scratch / "state"),
        }
        if options.tiny:
            self._environment["MSTAR_FAKE_MEMORY"] = FAKE
        self._figures = Figures()
        budgets = TINY_BUDGETS if options.tiny else BUDGETS
        self._report: dict[str, Any] = {**head(), "models": MODELS, "budgets": budgets, "phases_s": {}}

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"{time.perf_counter() - self._began:6.1f} s  {text}", file=sys.stderr, flush=True)

    def save(self, key: str, value: Any) -> None:
        """Add a result to the report, and write it."""
        self._report[key] = value
        self._report["phases_s"][key] = round(time.perf_counter() - self._began, 1)
        self._report["figures"] = self._figures.summary()
        if self._options.out is not None:
            write(self._report, self._figures.samples, self._options.out)

    def measure(self) -> int:
        """Measure everything. Returns 1 if a request was lost, or a phase is missing."""
        load: Load | None = None
        try:
            load = self._load()
        finally:
            self._end(load)
        print(json.dumps(self._report, indent=1), flush=True)
        return int(bool(load.lost) or self._report.get("mixed") is None)

    def _load(self) -> Load:
        options = self._options
        weights = {} if options.tiny else write_weights(options.folder or self._scratch / "weights", self.say)
        file = write_file(
            self._scratch / "serve.yaml",
            port=options.port,
            device=options.device,
            is_tiny=options.tiny,
            host_memory=options.host_memory,
            weights=weights,
        )
        self.save("serve_file", file.read_text(encoding="utf-8").splitlines())
        self.say("serve")
        words = [*MSTARCTL, "serve", str(file), "-d"]
        subprocess.run(words, check=True, env=self._environment, cwd=ROOT, timeout=SERVE_S, stdout=sys.stderr)
        return asyncio.run(self._under_watch())

    async def _under_watch(self) -> Load:
        options = self._options
        url = f"http://127.0.0.1:{options.port}"
        rest_s = float("inf") if options.deadline is None else options.deadline - STOP_S
        async with Watch(self._run_dir, self._state_dir, url, self.say) as watch:
            load = Load(
                url=url,
                run_dir=self._run_dir,
                watch=watch,
                figures=self._figures,
                say=self.say,
                save=self.save,
                until=self._began + min(rest_s, 86_400.0),
                clients=options.clients,
                pairs=options.pairs,
                rounds=options.rounds,
                mixed_s=60 * options.minutes,
            )
            try:
                await load.run()
            finally:
                self._report |= {"requests": load.sent, "lost": load.lost, "cut": load.cut, "memory": watch.memory}
                self.say(f"{load.sent} requests, {len(load.lost)} lost, {load.cut} cut by the end")
            series = await watch.series()
            added = {name: value for name, value in series.items() if "added_seconds" in name}
            self.save("gateway_counters", {**added, "pieces": series.get("mstar_gateway_pieces_total")})
            self.save("models_at_end", await watch.models())
        return load

    def _end(self, load: Load | None) -> None:
        """Read the logs, stop everything, and remove the folder of the run."""
        try:
            moved, slept = moves(self._state_dir), events(self._state_dir, "deployment.sleeps")
            woken = events(self._state_dir, "deployment.woken")
            self._report |= {
                "wakes_s": by_model(moved["woken"], "s"),
                "loads_s": by_model(moved["loaded"], "s"),
                "evictions": len(slept),
                "sleeps_s": by_model(slept, "took_s"),
                "sleeps_by_level": {
                    str(level): by_model([each for each in slept if each.get("level") == level], "took_s")
                    for level in (1, 2)
                },
                "wakes_of_deployments_s": {
                    str(level): by_model([each for each in woken if each.get("level") == level], "took_s")
                    for level in (1, 2)
                },
                "wakes": moved["woken"],
                "gpu": gpu_state(),
            }
            self.save("logs", "read")
            self.say(f"{len(moved['woken'])} wakes, {len(slept)} sleeps")
            if self._options.logs is not None:
                copy_logs(self._state_dir, self._options.logs)
        finally:
            for words in (("serve", "down"), ("down", "--all", "--now")):
                self._command(*words)
            shutil.rmtree(self._scratch, ignore_errors=True)
            self.say("stopped")

    def _command(self, *words: str) -> None:
        try:
            command = [*MSTARCTL, *words]
            subprocess.run(command, check=False, env=self._environment, cwd=ROOT, timeout=STOP_S / 2, stdout=sys.stderr)
        except subprocess.TimeoutExpired:
            self.say(f"{' '.join(words)} did not end in time")


def main() -> int:
    """Run the benchmark. Returns 1 if a request was lost, or a phase is missing."""
    options = read_options()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what was started is stopped
    return Run(options).measure()


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the mixed load")
    parser.add_argument("--deadline", type=float, help="seconds for everything; the mixed load gets what is left")
    parser.add_argument("--clients", type=int, default=4, help="clients at once")
    parser.add_argument("--rounds", type=int, default=2, help="turns in which each model is asked alone")
    parser.add_argument("--pairs", type=int, default=100, help="pairs of requests for the added first byte")
    parser.add_argument("--port", type=int, default=8650, help="port of the gateway")
    parser.add_argument("--host-memory", help="host memory for sleeping models, instead of the benchmark's own")
    parser.add_argument("--device", default="cuda", help="device of all models")
    parser.add_argument("--folder", type=Path, help="folder of the checkpoints; written there, and kept")
    parser.add_argument("--tiny", action="store_true", help="embedded checkpoints and faked memory")
    parser.add_argument("--out", type=Path, help="file of the report")
    parser.add_argument("--logs", type=Path, help="folder for the logs, which FOLDER.tar.gz holds too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
