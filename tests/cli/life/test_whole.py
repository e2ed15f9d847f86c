"""The whole way once, with real processes: up, call, the file that comes out, down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mstar_core.errors import ExitCode
from tests.fakes.deployment import free_port

Cli = Callable[..., Any]


def test_a_sentence_becomes_a_file_and_everything_is_stopped(tool: Cli, tmp_path: Path, runtime: Path) -> None:
    try:
        cache = ("--cache-dir", str(tmp_path / "cache"))
        words = ("up", "orpheus:tiny", "-d", "--host", "127.0.0.1", "--port", str(free_port()), *cache)
        # In a process of its own: the supervisor is a child of whoever started it.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "mstarctl", *words]
        up = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert up.returncode == 0, up.stderr
        assert "ready in" in up.stderr and "mstarctl call orpheus" in up.stderr and up.stdout == ""

        # 160 ids are 22 whole frames: enough for several windows of sound with any weights.
        asked = ("--text", "Hello there", "--param", "max_output_tokens=160", "--param", "ignore_eos=true")
        said = tool("call", "orpheus", *asked, "--voice", "tara", "--out", "a.wav", "-o", "json")
        assert said.code == 0, said.err
        item = json.loads(said.out)["items"][0]
        assert "the sound is noise" in said.err and "time to first audio" in said.err
        with wave.open("a.wav") as sound:
            assert sound.getnframes() / sound.getframerate() == pytest.approx(item["audio_s"], abs=1e-4)
        assert Path("a.wav").stat().st_size == 44 + item["bytes"]

        refused = tool("call", "--text", "Hello", "--voice", "nobody", "--out", "b.wav")
        assert (refused.code, "the voices are tara" in refused.err) == (ExitCode.USAGE, True)
        assert not Path("b.wav").exists()
        assert tool("call", "--text", "x", "--image", "a.wav").code == ExitCode.USAGE
        assert tool("call", "--text", "x", "--out", "no/such/folder.wav").code == ExitCode.INVALID
        second = tool("up", "orpheus:tiny", "-d")
        assert (second.code, "already running" in second.err) == (ExitCode.INVALID, True)
    finally:
        down = tool("down", "--all", "--now")
    assert down.code == 0, down.err
    assert [path.name for path in runtime.iterdir()] == [".state"]
