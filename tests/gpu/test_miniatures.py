"""Every trained miniature on a GPU, judged by its family's judge over HTTP on more worlds than the CPU tests take."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.ports import free_port

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ROOT / "plugins"
LIMIT_S = 300.0


MANY = 32
"""Requests at a time in a full batch. Alone, it is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A miniature and its judge. folder: where the judge runs; words: its command, in which `{url}`, `{tmp}` and
    `{workers}`, the requests at a time, are replaced.

    needs: packages without which the judge cannot run.
    """

    folder: Path
    words: Sequence[str]
    needs: Sequence[str] = ()


JUDGED = {
    "bagel": Judged(
        folder=PLUGINS / "mstar-bagel/train",
        words=("judge_shapes.py", "{url}", "--count", "100", "--workers", "{workers}"),
    ),
    "pi05": Judged(
        folder=PLUGINS / "mstar-pi05/train",
        words=("judge_arm.py", "{url}", "--episodes", "64", "--workers", "{workers}"),
    ),
    "vjepa2_ac": Judged(
        folder=PLUGINS / "mstar-vjepa2/train",
        words=("judge_block.py", "{url}", "--episodes", "16", "--workers", "{workers}"),
    ),
    "qwen3_omni": Judged(
        folder=PLUGINS / "mstar-qwen3omni",
        words=("-m", "train.judge", "{url}", "{tmp}", "--fresh", "300", "--workers", "{workers}"),
        needs=("espeakng_loader",),
    ),
    "orpheus": Judged(
        folder=PLUGINS / "mstar-orpheus",
        words=("-m", "train.judge", "--url", "{url}", "--sentences", "30", "--processes", "{workers}"),
        needs=("pocketsphinx",),
    ),
    "qwen3_tts": Judged(
        folder=PLUGINS / "mstar-qwen3tts",
        words=("-m", "train.judge", "{url}", "--rounds", "3", "--workers", "{workers}"),
        needs=("pocketsphinx", "soxr"),
    ),
    "wan22": Judged(
        folder=PLUGINS / "mstar-wan22/train",
        words=("judge_moves.py", "{url}", "--videos", "60", "--workers", "{workers}"),
    ),
    "whisper": Judged(
        folder=PLUGINS / "mstar-whisper",
        words=("-m", "train.judge", "{url}", "--workers", "{workers}"),
    ),
    "llm": Judged(
        folder=PLUGINS / "mstar-llm",
        words=("-m", "train.judge", "--url", "{url}", "--questions", "400", "--workers", "{workers}"),
    ),
}


def mstarctl(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "mstarctl", *words], cwd=ROOT, check=True, timeout=LIMIT_S)


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = f"/tmp/mstar-mini-{os.getpid()}"  # short: paths of sockets are limited
    monkeypatch.setenv("MSTAR_RUNTIME_DIR", folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    yield
    subprocess.run([sys.executable, "-m", "mstarctl", "down", "--all", "--now"], cwd=ROOT, check=False, timeout=LIMIT_S)


@pytest.mark.parametrize("family", JUDGED)
def test_a_judge_is_content_with_the_miniature(family: str, environment: None, tmp_path: Path) -> None:
    judged, port = JUDGED[family], free_port()
    missing = [name for name in judged.needs if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"the judge of {family} needs {', '.join(missing)}")
    address = ("--host", "127.0.0.1", "--port", str(port))
    mstarctl("up", f"{family}:mini", "--name", family, "--device", "cuda", *address, "-d", "--wait")
    for workers in (1, MANY):
        words = [word.format(url=f"http://127.0.0.1:{port}", tmp=tmp_path, workers=workers) for word in judged.words]
        done = subprocess.run(
            [sys.executable, *words], cwd=judged.folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        print(f"{family}, {workers} at a time: {done.stdout}")
        assert done.returncode == 0, f"{workers} at a time: {done.stdout}\n{done.stderr[-2000:]}"
