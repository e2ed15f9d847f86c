"""Docs: pages name existing things, and their commands run."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mstar_core.errors import ExitCode
from mstarctl.main import VERBS, resolve
from tests.fakes.ports import free_port
from tests.fakes.script import script

ROOT = Path(__file__).resolve().parents[2]
PAGES = (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")))
FENCE = re.compile(r"^```(?P<kind>\w*)\n(?P<text>.*?)^```", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`([^`\n]+)`")
SHELL = ("", "console", "sh", "bash")
COMMAND = re.compile(r"(?:^|[\s;&|(])mstarctl( [^|;&#`)]*)")
ENVIRONMENT = re.compile(r"""environ(?:ment)?(?:\)|\b)\.get\(\s*"([A-Z][A-Z_]+)"|environ\[?"([A-Z_]+)"\]""")
TESTS = re.compile(r"`((?:tests|plugins)/[\w/.-]+\.py)::(\w+)`")
OPERATING = "docs/operating.md"


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def shell_blocks(page: Path) -> list[str]:
    """Return the fenced blocks of commands, with continuation lines joined."""
    blocks = FENCE.finditer(page.read_text(encoding="utf-8"))
    return [match["text"].replace("\\\n", " ") for match in blocks if match["kind"] in SHELL]


def typed_lines(page: Path) -> Iterator[str]:
    """Return the lines of shell blocks and code spans that call mstarctl or make."""
    text = page.read_text(encoding="utf-8")
    for block in shell_blocks(page):
        yield from (line.removeprefix("$ ") for line in block.splitlines())
    yield from SPAN.findall(FENCE.sub("", text))


def commands(page: Path) -> list[list[str]]:
    """Return the arguments of every `mstarctl` command on a page, without placeholders and comments."""
    lines = (line.partition("#")[0] for line in typed_lines(page))
    typed = [match[1] for line in lines for match in COMMAND.finditer(line)]
    return [shlex.split(words.replace("…", "")) for words in typed if words.strip()]


def test_generated_parts_are_current_and_links_lead_somewhere() -> None:
    command = [sys.executable, "scripts/docs.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", ["docs/plugins.md", "docs/plugin-cookbook.md", "docs/plugin-reference.md"])
def test_examples_for_authors_are_python(page: str) -> None:
    found = FENCE.finditer((ROOT / page).read_text(encoding="utf-8"))
    examples = [match["text"] for match in found if match["kind"] == "py"]
    assert examples
    for text in examples:
        ast.parse(text)


def test_a_stale_file_is_told_and_left_alone() -> None:
    before = (ROOT / "docs/wire/schema.json").read_bytes()
    files: Mapping[str, Callable[[], str]] = {"docs/wire/schema.json": lambda: "something else"}
    assert list(script("docs").rewrite(files, is_check=True)) == ["docs/wire/schema.json: stale; run make docs"]
    assert (ROOT / "docs/wire/schema.json").read_bytes() == before


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_command_and_flag_exists(page: Path) -> None:
    verbs = {verb.name: verb for verb in VERBS}
    for words in commands(page):
        if not words[0].islower() or words[0].startswith("-"):
            continue  # a placeholder, or a global flag
        assert words[0] in verbs, f"mstarctl {' '.join(words)}"
        command: Any = resolve(verbs[words[0]])
        parts = getattr(command, "commands", None)
        if parts and len(words) > 1 and words[1].islower():
            assert words[1] in parts, f"mstarctl {' '.join(words)}"
            command = parts[words[1]]
        known = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
        words = words[: words.index("--")] if "--" in words else words  # what follows is passed on
        flags = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)} - {"-h", "--help"}
        assert flags <= known, f"mstarctl {' '.join(words)}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_make_target_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {name for line in typed_lines(page) for name in re.findall(r"(?:^|&& )make ([a-z-]+)", line)}
    assert named <= targets


def test_the_table_of_exit_codes_is_the_enum() -> None:
    text = (ROOT / "docs/operating.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\d+)` \| `(\w+)` \|", text, re.MULTILINE)
    assert {(int(number), name) for number, name in rows} == {(int(code), code.name.lower()) for code in ExitCode}
    assert len(rows) == len(ExitCode)


def test_every_environment_variable_that_is_read_is_on_the_page() -> None:
    page = (ROOT / "docs/operating.md").read_text(encoding="utf-8")
    sources = (path for top in ("mstarctl", "mstar_core") for path in (ROOT / top).rglob("*.py"))
    read = {name for path in sources for pair in ENVIRONMENT.findall(path.read_text()) for name in pair if name}
    assert {"MSTAR_RUNTIME_DIR", "MSTAR_CACHE_DIR", "MSTAR_PLUGINS"} <= read
    assert {name for name in read if name not in page} == set()


def test_every_row_of_the_catalogue_has_a_state_and_tests_that_exist() -> None:
    text = (ROOT / "docs/status.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| ([\w ]+) \| (.*)\|$", text, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 78))
    count = Counter(state for _, state, _ in rows)
    assert f"Of 77 rows {count['tested']} are tested, {count['in part']} in part, {count['open']} open." in text
    for number, state, proof in rows:
        assert state in ("tested", "in part", "open"), number
        named = TESTS.findall(proof)
        assert (state == "open") == (not named) or f"as {int(number) - 1}" in proof, number
        for file, name in named:
            assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{name}"


def test_the_example_of_the_wire_page_runs() -> None:
    text = (ROOT / "docs/wire/README.md").read_text(encoding="utf-8")
    (block,) = (match["text"] for match in FENCE.finditer(text) if match["kind"] == "python")
    subprocess.run([sys.executable, "-c", block], cwd=ROOT, check=True)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Return a function that runs a command in a new folder with its own port and run directory. Stops deployments."""
    port = free_port()
    runtime = tempfile.mkdtemp(prefix="md-")  # short, because it contains sockets
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "MSTAR_RUNTIME_DIR": runtime}
    (tmp_path / "configs").symlink_to(ROOT / "configs")

    def run(line: str) -> str:
        typed = line.replace("localhost:8000", f"localhost:{port}")
        if typed.startswith("mstarctl up"):
            typed += f" --port {port} --host 127.0.0.1"
        done = subprocess.run(
            ["bash", "-c", typed],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    try:
        yield run
    finally:
        subprocess.run(["mstarctl", "down", "--all", "--now"], env=environment, capture_output=True, check=False)
        shutil.rmtree(runtime, ignore_errors=True)


@pytest.mark.timeout(900)
def test_the_operators_commands_run(shell: Callable[[str], str]) -> None:
    """scripts/tour.py runs those of the README (tests/scripts/test_tour.py)."""
    lines = [line for block in shell_blocks(ROOT / OPERATING) for line in block.splitlines()]
    typed = [line for line in dict.fromkeys(lines) if line.startswith("mstarctl ")]
    # One deployment for all commands. doctor is left out, because it checks the host.
    apart = ("mstarctl up", "mstarctl down", "mstarctl doctor")
    ups = [line for line in typed if line.startswith("mstarctl up")]
    shell(ups[0])
    answers = {line: shell(line) for line in typed if not line.startswith(apart)}
    assert len(answers) >= 12
    shell("mstarctl down orpheus")
