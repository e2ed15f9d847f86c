"""The version, the plugins and the changelogs agree, and the check finds what does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.fakes.script import script

ROOT = Path(__file__).resolve().parents[2]


release = script("release")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the files that state a version, with an empty Unreleased."""
    files = [release.VERSION, release.CHANGELOG]
    files += [
        path.relative_to(ROOT) for path in ROOT.glob("plugins/*/*") if path.name in ("pyproject.toml", "CHANGELOG.md")
    ]
    for path in files:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
        if path.name == "CHANGELOG.md":
            head, _, rest = (tmp_path / path).read_text().partition("## Unreleased\n")
            dated = rest[rest.index("\n## ") :]
            (tmp_path / path).write_text(f"{head}## Unreleased\n{dated}")
    return tmp_path


def test_the_version_agrees_everywhere() -> None:
    assert list(release.disagreements(ROOT, is_draft=True)) == []


def test_a_tree_with_an_empty_unreleased_is_ready(tree: Path) -> None:
    assert list(release.disagreements(tree)) == []


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_each_disagreement_is_found(tree: Path) -> None:
    version = release.own_version(tree)
    plugin = next(tree.glob("plugins/*/pyproject.toml"))
    change(tree / release.CHANGELOG, "## Unreleased\n", "## Unreleased\n\n- something new\n")
    change(plugin, f'version = "{version}"', 'version = "9.0.0"')
    change(plugin, "mstarctl[runtime]>=", "mstarctl[runtime]>")
    change(plugin.with_name("CHANGELOG.md"), f"## {version} (", "## next (")
    actual = "\n".join(release.disagreements(tree))
    for words in ("Unreleased is not empty", "version 9.0.0, mstarctl is", "the dependencies lack", "is not '"):
        assert words in actual, actual
    assert len(actual.splitlines()) == 4
