"""Fixtures of the client tests: an api with a model of every modality, and a thread for the synchronous client."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest
import pytest_asyncio

from mstar_core.client import MStarClient
from tests.api.conftest import Api, running
from tests.fakes.any_model import SPEC, everything
from tests.fakes.conductor import Script

T = TypeVar("T")
ROOT: Final = Path(__file__).resolve().parents[2]
EXAMPLES: Final = ROOT / "examples"
FENCE: Final = re.compile(r"^```\w*\n(?P<text>.*?)^```", re.DOTALL | re.MULTILINE)
NODE: Final = Path(os.environ.get("MSTAR_NODE_MODULES", ROOT / "build" / "node" / "node_modules"))
SHARED = pytest.mark.asyncio(loop_scope="module")
"""For tests that take `api`: they run in the loop that it lives in."""


@asynccontextmanager
async def any_api(script: Script | None = everything, **changes: Any) -> AsyncIterator[Api]:
    """An api that serves the model of every modality. changes: as for `running`."""
    async with running(script, model=SPEC, **changes) as api:
        yield api


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_api() -> AsyncIterator[Api]:
    """One api for the tests of a module."""
    async with any_api() as started:
        yield started


@pytest.fixture
def api(shared_api: Api) -> Api:
    """The module's api, with nothing noted of what came before. A test may set `api.fake.script`."""
    shared_api.fake.received.clear()
    shared_api.fake.script = everything
    return shared_api


async def in_thread(work: Callable[[MStarClient], T], url: str, **options: Any) -> T:
    """Run `work` with a client of its own on a thread, while the api runs in this loop."""

    def run() -> T:
        with MStarClient(url, **options) as client:
            return work(client)

    return await asyncio.to_thread(run)


def told(command: list[str], folder: Path) -> str:
    """Return the output of a command. Fails if the command fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def node_modules() -> Path:
    """The folder that holds openai-node. Skips the test where it, or node, is missing."""
    if shutil.which("node") is None:
        pytest.skip("runs where node is installed")
    if not (NODE / "openai").is_dir():
        expected = "npm install openai --prefix build/node, or set MSTAR_NODE_MODULES"
        pytest.skip(f"runs where {NODE} holds openai-node: {expected}")
    return NODE


def curl_lines() -> list[str]:
    """The curl commands of docs/http-api.md as a reader types them, continued lines joined."""
    text = (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8")
    blocks = [match["text"].replace("\\\n", " ") for match in FENCE.finditer(text)]
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("curl ")]
    others = ("/v1/completions", "/v1/audio/voices", '"voice": "anna"')  # no model of these tests has them
    return [line for line in lines if not any(part in line for part in others)]


def is_chat(line: str) -> bool:
    """Whether a command is for a route that a speech model does not have."""
    return any(path in line for path in ("/v1/chat/completions", "/v1/images/", "/v1/audio/transcriptions"))
