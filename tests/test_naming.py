"""Names of test files: each is called after the module that it tests, or belongs to a suite."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = sorted(ROOT.glob("plugins/*/src"))
TESTED = {
    "tests/bench": "bench",
    "tests/cli": "mstarctl",
    "tests/scripts": "scripts",
    "tests/top": "mstarctl/top",
    **{f"{root.parent.relative_to(ROOT)}/tests": str(root.parent.relative_to(ROOT)) for root in PLUGINS},
}
"""Folder that a folder of tests is about, unless it is `mstar_core/NAME` for `tests/NAME`."""
SUITES = {
    "tests/cli/life",  # commands over the life of a deployment
    "tests/conformance",
    "tests/docs",
    "tests/families",  # the same checks for every family
    "tests/gpu",
    "tests/outside",  # programs that no one here wrote
    "tests/hosts",  # deployments over several hosts
    "tests/parallel",  # tensor parallelism through all layers
    "tests/runtime",  # deployments of real processes
    "tests/sdk",  # clients against a real api
    "tests/survival",  # deaths of processes in the middle of requests
    "tests/web",  # pages in a browser
}
"""Folders of tests of behaviour that no single module has."""
TOPICS = {"conformance", "docs", "golden", "gpu", "http", "mini", "mutations", "served"}
"""First words of files with such tests in other folders."""


def subjects_of(tests: str) -> set[str]:
    """Names of the modules and folders that the tests of a folder are about."""
    root = ROOT / TESTED.get(tests, tests.replace("tests/", "mstar_core/", 1))
    paths = [path.relative_to(root.parent) for path in root.rglob("*.py") if f"{tests}/" not in str(path)]
    return {name for path in paths for name in (path.stem, *path.parts[:-1])}


def is_named_after(name: str, subjects: set[str]) -> bool:
    """Whether `test_NAME.py` begins with one of the subjects: `MODULE`, or `MODULE_ASPECT`."""
    words = name.split("_")
    return any("_".join(words[:count]) in subjects for count in range(1, len(words) + 1))


TEST_FOLDERS = sorted(
    str(folder.relative_to(ROOT))
    for folder in (*ROOT.glob("tests/*/"), *ROOT.glob("plugins/*/tests/"))
    if any(folder.rglob("test_*.py"))
)


@pytest.mark.parametrize("folder", [name for name in TEST_FOLDERS if name not in SUITES])
def test_tests_are_named_after_the_module_that_they_test(folder: str) -> None:
    paths = [path for path in (ROOT / folder).rglob("test_*.py") if str(path.parent.relative_to(ROOT)) not in SUITES]
    subjects = subjects_of(folder) | TOPICS
    names = {path.name for path in paths if not is_named_after(path.stem.removeprefix("test_"), subjects)}
    assert names == set()


def test_a_name_without_its_module_is_found() -> None:
    assert is_named_after("page_table", {"page_table"})
    assert is_named_after("page_table_growth", {"page_table"})
    assert not is_named_after("pages", {"page_table", "page"})
    assert "page_pool" in subjects_of("tests/engine")
    assert "page_pool" not in subjects_of("tests/cli")


def test_the_longest_files_exist() -> None:
    paths = (ROOT / "tests" / "longest_files.txt").read_text(encoding="utf-8").split()
    assert [path for path in paths if not (ROOT / path).is_file()] == [] and len(set(paths)) == len(paths)
