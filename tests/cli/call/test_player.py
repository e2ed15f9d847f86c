"""Players of sound that `call --play` and `chat` start."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from mstar_core.errors import UsageError
from mstarctl.call.player import Player, find_player, required_player

PCM = b"\x01\x00" * 2400


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize("name", ["ffplay", "aplay"])
def test_sound_is_piped_to_the_player_as_wav(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, name, f"/bin/cat > {tmp_path}/heard.wav")
    monkeypatch.setenv("PATH", str(tmp_path))
    player = Player(required_player())
    player.write(PCM, 24000, 1)
    player.write(PCM, 24000, 1)
    player.close()
    heard = (tmp_path / "heard.wav").read_bytes()
    assert heard.startswith(b"RIFF") and heard.endswith(PCM + PCM) and not player.is_broken


def test_afplay_gets_a_complete_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "afplay", f'/bin/cp "$1" {tmp_path}/heard.wav')
    monkeypatch.setenv("PATH", str(tmp_path))
    player = Player(required_player())
    player.write(PCM, 24000, 1)
    player.close()
    heard = (tmp_path / "heard.wav").read_bytes()
    assert heard.endswith(PCM) and int.from_bytes(heard[4:8], "little") == len(heard) - 8


def test_a_player_that_ends_early_does_not_end_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "ffplay", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    player = Player(required_player())
    for _ in range(200):
        player.write(PCM, 24000, 1)
    player.close()
    assert player.is_broken


def test_a_player_that_was_stopped_before_it_started_does_not_play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread writes the first sound, which starts the program, while an interrupt stops it."""
    program(tmp_path, "ffplay", "exec /bin/sleep 600")
    monkeypatch.setenv("PATH", str(tmp_path))
    player = Player(required_player())
    player.stop()
    player.write(PCM, 24000, 1)
    player.close()  # waits for the end of the program
    assert player.is_broken


def test_a_machine_without_a_player_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_player() is None
    with pytest.raises(UsageError, match="no program that plays sound") as failed:
        required_player()
    assert "ffplay, aplay and afplay" in failed.value.detail and "--out" in failed.value.hint
