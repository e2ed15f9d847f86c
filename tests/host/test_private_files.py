"""Run directories that another user could replace are refused, and their files follow no link."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from mstar_core.errors import ConfigError
from mstar_core.host.private_files import exposure, write_private
from mstar_core.host.run_dir import RunDirectory
from mstar_core.process.failures import write_fatal

GiveAway = Callable[[Path], None]
STRANGER = 4242


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> GiveAway:
    """Return a function that makes a path belong to another user."""

    def give(path: Path) -> None:
        if os.getuid() == 0:
            os.chown(path, STRANGER, -1, follow_symlinks=False)
        else:
            monkeypatch.setattr(os, "getuid", lambda: STRANGER)

    return give


def refused(root: Path) -> str:
    """Return the error of creating a run directory in `root`."""
    with pytest.raises(ConfigError) as caught:
        RunDirectory(root / "d").create()
    assert "MSTAR_RUNTIME_DIR" in caught.value.hint
    return str(caught.value)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "mstar-0"
    made.mkdir(mode=0o700)
    return made


def test_a_parent_of_another_user_is_refused(root: Path, give_away: GiveAway) -> None:
    give_away(root)
    assert "open to other users" in refused(root)
    assert not (root / "d").exists()


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777])
def test_a_parent_that_others_can_write_is_refused(root: Path, mode: int) -> None:
    root.chmod(mode)
    assert f"{root} can be written by other users" in refused(root)


def test_a_folder_above_may_be_sticky_and_no_more(tmp_path: Path, root: Path) -> None:
    tmp_path.chmod(0o1777)
    RunDirectory(root / "d").create()
    tmp_path.chmod(0o777)
    assert f"{tmp_path} can be written" in refused(root)


def test_a_link_of_another_user_is_refused_and_an_own_one_is_followed(
    tmp_path: Path, root: Path, give_away: GiveAway
) -> None:
    link = tmp_path / "link"
    link.symlink_to(root)
    assert exposure(link) is None
    give_away(link)
    assert "belongs to uid" in refused(link)


@pytest.mark.parametrize("kind", ["link", "file", "stranger"])
def test_a_run_directory_that_was_there_before_must_be_an_own_folder(
    kind: str, tmp_path: Path, root: Path, give_away: GiveAway
) -> None:
    path = root / "d"
    if kind == "link":
        path.symlink_to(tmp_path)
    elif kind == "file":
        path.write_text("")
    else:
        path.mkdir(mode=0o700)
        give_away(path)
    refused(root)


@pytest.mark.parametrize("name", ["spec.part", "spec.json"])
def test_a_planted_link_is_replaced_and_its_target_keeps_its_content(root: Path, name: str) -> None:
    victim = root.parent / "victim"
    victim.write_text("precious")
    (root / name).symlink_to(victim)
    write_private(root / "spec.json", b"{}")
    assert victim.read_text() == "precious"
    assert (root / "spec.json").read_bytes() == b"{}" and not (root / "spec.json").is_symlink()
    assert stat.S_IMODE((root / "spec.json").stat().st_mode) == 0o600
    assert {path.name for path in root.iterdir()} <= {"spec.json", "spec.part"}


def test_the_record_of_a_death_follows_no_link(root: Path) -> None:
    victim = root.parent / "victim"
    victim.write_text("precious")
    for name in ("api.fatal.part", "api.fatal.json"):
        (root / name).symlink_to(victim)
    write_fatal(root / "api.fatal.json", {"pid": 1, "message": "x"})
    assert victim.read_text() == "precious" and not (root / "api.fatal.json").is_symlink()


def test_the_lock_follows_no_link(root: Path) -> None:
    run = RunDirectory(root / "d")
    run.create()
    run.lock.symlink_to(root.parent / "victim")
    with pytest.raises(OSError, match="symbolic links|symlink"):
        run.acquire()
    assert not (root.parent / "victim").exists()


def test_a_write_that_fails_leaves_no_part(root: Path) -> None:
    (root / "spec.json").mkdir()
    with pytest.raises(OSError):
        write_private(root / "spec.json", b"{}")
    assert [path.name for path in root.iterdir()] == ["spec.json"]
