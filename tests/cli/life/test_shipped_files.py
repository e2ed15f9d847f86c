"""Every shipped deployment file, started by `up` with the miniature's weights, serves a request over HTTP."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from mstar_core.conformance.samples import asks_of
from tests.cli.life.test_whole import WAIT_S, mstarctl
from tests.fakes.ports import free_port
from tests.families.families import ROOT, SPECS
from tests.runtime.deployment import cache_dir

IN_CI = ("bagel_cfg_parallel", "qwen3omni_tp2_full")
"""Files whose requests cross most processes. The others start with `-m slow`; one process serves them in every run."""

FILES = [
    pytest.param(path, id=path.stem, marks=[] if path.stem in IN_CI else pytest.mark.slow)
    for path in sorted((ROOT / "configs").glob("*.yaml"))
]

SMALL = ("--set", "max_seq_len=512", "--set", "max_concurrent_requests=4", "--set", "kv_cache.tokens=8192")
FIRST = {"vjepa2_ac": 1}
"""Number of the sample to send, by model; elsewhere the first."""
OPTIONS = {"pi05_aloha": ("--set", "model_kwargs.norm_stats=none")}
"""Options of `up` by file: the miniature's statistics are those of one arm."""

PARAMS = {"pi05_aloha": {"robot_state": [0.25] * 14}}
"""Parameters in place of the sample's, by file."""

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def folder() -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(prefix="mst-"))
    yield home
    with mstarctl(home, "down", "--all", "--now") as down:
        down.communicate(timeout=WAIT_S)
    shutil.rmtree(home)


@pytest.mark.parametrize("path", FILES)
def test_a_file_serves_a_request(path: Path, folder: Path) -> None:
    port = free_port()
    words = ("--device", "cpu", "--host", "127.0.0.1", "--port", str(port), "--cache-dir", str(cache_dir()), *SMALL)
    words += OPTIONS.get(path.stem, ())
    with mstarctl(folder, "up", f"{path.stem}:tiny", "-d", *words) as up:
        _, err = up.communicate(timeout=WAIT_S)
    assert up.returncode == 0, err
    model = yaml.safe_load(path.read_text(encoding="utf-8"))["model"]
    ask = asks_of(SPECS[model])[FIRST.get(model, 0)]
    files = [("files", (part.name, part.data)) for part in ask.media]
    inputs = {
        **({} if ask.text is None else {"text": ask.text}),
        "input_modalities": ",".join(kind for kind, _ in ask.order),
        "output_modalities": ",".join(ask.outputs),
        "streaming": "false",
        "model_kwargs": json.dumps({**ask.params, **PARAMS.get(path.stem, {})}),
    }
    answer = httpx.post(f"http://127.0.0.1:{port}/generate", data=inputs, files=files or None, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    assert answer.json(), answer.text
