"""Demo of `make demo`: start a miniature deployment, synthesize a sentence, report the figures, stop everything.

It runs ordinary mstarctl commands. Everything that it starts lives in its own directory, so that it neither sees nor
disturbs other deployments, and is stopped at the end, also on failure and on Ctrl-C.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
MINIATURE = ROOT / "plugins" / "mstar-orpheus" / "src" / "mstar_orpheus" / "checkpoint" / "mini"
HAS_MINIATURE = (MINIATURE / "lm" / "model.safetensors").is_file()
MODEL = "orpheus:mini" if HAS_MINIATURE else "orpheus:tiny"
SPEAKER = (
    "a miniature of under 3M parameters, trained by this project" if HAS_MINIATURE else "a checkpoint of random weights"
)
NAME = "demo"
TEXT = "This is a small machine and it can speak to you."
VOICE = "tara"
PARAMS = {"seed": "3", "temperature": "0.4", "top_p": "0.9", "repetition_penalty": "1.0"}
OUT = ROOT / "out" / "demo.wav"
STOP_S = 90.0
SHORT = 48
"""Longest path of the temporary directory: a socket's whole path may have 107 bytes."""


def main() -> int:
    """Run the demo. Returns 0 if audio was produced and every process has ended."""
    return in_own_folder(run)


def in_own_folder(run: Callable[[dict[str, str]], int]) -> int:
    """Run with the environment of a folder for this run alone, stop what it started, and return the exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    begun = time.monotonic()
    OUT.parent.mkdir(exist_ok=True)
    folder = tempfile.mkdtemp(prefix="mstar-demo-", dir=short_root())
    # The log directory inside is removed with it, unless something failed.
    environment = {**os.environ, "MSTAR_RUNTIME_DIR": folder, "OMP_NUM_THREADS": "1"}
    environment.pop("XDG_STATE_HOME", None)
    code = 1
    try:
        code = run(environment)
    except subprocess.CalledProcessError as error:
        code = error.returncode if error.returncode > 0 else 1
        print(f"demo: mstarctl {error.cmd[3]} failed with exit code {code}", file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
        print("\ndemo: interrupted", file=sys.stderr)
    finally:
        is_clean = stop(environment)
    if is_clean and code in (0, 130):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"demo: the logs are kept in {folder}/.state", file=sys.stderr)
    print(f"done in {time.monotonic() - begun:.1f} s", file=sys.stderr)
    return code or (0 if is_clean else 1)


def short_root() -> str:
    """Return the temporary directory, or /tmp if its path is too long for sockets below it."""
    chosen = tempfile.gettempdir()
    return chosen if len(chosen) <= SHORT else "/tmp"


def run(environment: dict[str, str]) -> int:
    """Start, call, report. Raises CalledProcessError if a command fails; its error is already printed."""
    port = free_port()
    step(f"starting {MODEL}, {SPEAKER}, on the CPU")
    start(environment, MODEL, port)
    step(f"synthesizing with voice {VOICE}: {TEXT}")
    words = ["call", NAME, "--text", TEXT, "--voice", VOICE, "--out", str(OUT), "-o", "json"]
    words += [word for key, value in PARAMS.items() for word in ("--param", f"{key}={value}")]
    answer = mstarctl(environment, *words, is_read=True)
    facts = json.loads(answer)["items"][0]
    if not facts["audio_s"]:
        print("demo: no audio was produced", file=sys.stderr)
        return 1
    step("running deployments")
    mstarctl(environment, "ps", "-o", "wide")
    report(facts)
    return 0


def start(environment: dict[str, str], model: str, port: int) -> None:
    """Start a model on the CPU and wait until it is ready."""
    words = ["--name", NAME, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "-d"]
    mstarctl(environment, "up", model, *words)


def report(facts: dict[str, Any]) -> None:
    """Print the figures and further commands on stdout."""
    took = f"{facts['total_ms'] / 1000:.1f} s for {facts['audio_s']:.1f} s of audio"
    print()
    print(f"time to first audio  {facts['first_ms']:.0f} ms")
    print(f"real-time factor     {facts['real_time_factor']:.2f}  ({took}; below 1 is faster than playback)")
    print(f"chunks               {facts['chunks']}, written as they arrived")
    print(f"file                 {shown(OUT)}")
    if HAS_MINIATURE:
        print(f"speaker              {SPEAKER}")
        print(f"recognized text      {heard(OUT)}")
    else:
        print("                     The audio is NOISE: the embedded checkpoint has random weights.")
        print("                     Everything else of the run is real.")
    print()
    print("try next")
    print("  . .venv/bin/activate")
    print(f"  mstarctl up {MODEL} -d          # leave one running")
    print('  mstarctl call orpheus --text "Hello there" --voice tara --out hello.wav')
    print("  mstarctl ps; mstarctl logs; mstarctl down")
    print("  make demo-all                        # every family: speaks, answers, draws, acts, plans")
    print("  mstarctl up orpheus                  # the official weights")
    print(flush=True)


def heard(path: Path) -> str:
    """Return the text that pocketsphinx recognizes in a WAV file, or why there is none."""
    if importlib.util.find_spec("pocketsphinx") is None:
        return "not checked: pocketsphinx is not installed (pip install pocketsphinx)"
    sys.path.insert(0, str(ROOT / "plugins" / "mstar-orpheus"))
    from train.recognizer import Recognizer

    with wave.open(str(path)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
    return " ".join(Recognizer().words(samples)) or "nothing"


def stop(environment: dict[str, str]) -> bool:
    """Stop every deployment of the demo, ignoring Ctrl-C. Returns whether all have ended."""
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        if not Path(environment["MSTAR_RUNTIME_DIR"], NAME).exists():
            return True
        step("stopping")
        command = [*tool(), "down", "--all", "--now"]
        return subprocess.run(command, env=environment, cwd=ROOT, timeout=STOP_S, check=False).returncode in (0, 4)
    except subprocess.TimeoutExpired:
        print(f"demo: the deployment did not stop; see {environment['MSTAR_RUNTIME_DIR']}", file=sys.stderr)
        return False
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def tool() -> list[str]:
    """Return the command that runs mstarctl in this environment."""
    return [sys.executable, "-m", "mstarctl"]


def mstarctl(environment: dict[str, str], *words: str, is_read: bool = False) -> str:
    """Run one command; its narration goes to stderr. Returns its data with is_read. Raises CalledProcessError."""
    print(
        f"$ mstarctl {shlex.join(shown(Path(word)) if word == str(OUT) else word for word in words)}",
        file=sys.stderr,
        flush=True,
    )
    stdout = subprocess.PIPE if is_read else None
    result = subprocess.run([*tool(), *words], env=environment, cwd=ROOT, stdout=stdout, text=True, check=True)
    return result.stdout or ""


def step(text: str) -> None:
    """Print one line of narration."""
    print(f"\n== {text}", file=sys.stderr, flush=True)


def shown(path: Path) -> str:
    """Return a path relative to the root of the project, if it is below it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
