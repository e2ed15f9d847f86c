"""scripts/tour.py: every printed command runs, and one that fails, or writes nothing, ends the tour with 1."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.fakes.script import script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tour() -> ModuleType:
    """The script as a module."""
    return script("tour")


@pytest.mark.timeout(900)
def test_everything_that_is_printed_runs() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/tour.py"], cwd=ROOT, capture_output=True, text=True, timeout=850, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for part in (
        "--sample --out plan",
        "python examples/robot.py",
        "python examples/encode.py",
        "python examples/tools.py",
        "curl -s",
        "top --once",
    ):
        assert part in done.stdout


def test_the_tour_covers_the_readme_every_miniature_and_every_example(tour: ModuleType) -> None:
    assert set(tour.stops()) == {*tour.MINIATURES, tour.README, "vjepa2:tiny"}
    assert len(tour.readme_commands()) >= 18
    assert len({path for _, path, _ in tour.examples()}) == len(list((ROOT / "examples").iterdir()))


def test_a_command_that_fails_is_told(tour: ModuleType, tmp_path: Path) -> None:
    stop = tour.Stop(name="x", home=tmp_path)
    stop.folder.mkdir()
    assert stop.run("echo yes")[0] == "yes\n"
    with pytest.raises(tour.TourFailed, match="exit 3\nwhy"):
        stop.run("echo why; exit 3")


def test_a_file_that_a_command_names_and_does_not_write_is_told(tour: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "bin").mkdir()
    for name, said in (("mstarctl", "a.wav"), ("curl", '{"error": "no"}')):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\necho '{said}'\n")
        (tmp_path / "bin" / name).chmod(0o755)

    class Faked(tour.Stop):  # type: ignore[misc, name-defined]
        @property
        def environment(self) -> dict[str, str]:
            return {"PATH": f"{tmp_path / 'bin'}:/bin:/usr/bin"}

    stop = Faked(name="x", home=tmp_path)
    with pytest.raises(tour.TourFailed, match=r"wrote a\.wav, which is missing"):
        stop.run("mstarctl call x --out a.wav")
    with pytest.raises(tour.TourFailed, match="error"):
        stop.run("curl -s localhost:8000/generate")
    (stop.folder / "a.wav").write_bytes(b"RIFF")
    stop.run("mstarctl call x --out a.wav")
