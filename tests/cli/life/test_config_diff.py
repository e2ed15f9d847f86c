"""`config diff` of a running deployment against its changed file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mstar_core.config.files.load import read_file
from mstar_core.errors import ExitCode
from mstarctl.authoring.config_file import differences
from mstarctl.commands.config import config_now
from mstarctl.plugins import Plugins
from mstarctl.start.launch import Started, wait_ready
from mstarctl.start.options import UpOptions
from mstarctl.start.plan import make_planned
from mstarctl.start.target import Target, parse_set, resolve_target
from tests.fakes.ports import free_port

Cli = Callable[..., Any]
Launch = Callable[..., Started]
TEXT = "model: orpheus\nnode_groups:\n  - node_names: [LLM, snac_decoder]\n    ranks: [0]\nmax_queue: 9\n"


def test_what_changed_since_the_start_is_shown_with_its_places(tool: Cli, start: Launch, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(TEXT)
    target = Target(spec=Plugins.discover().model("orpheus"), config=read_file(file))
    flags = ("max_seq_len=4096", "max_concurrent_requests=32", f"api.port={free_port()}", "name=fake")
    config = resolve_target(target, [parse_set(flag) for flag in flags])
    started = start(**{**msgspec.structs.asdict(config), "config_file": str(file)})
    wait_ready(started, lambda snapshot: None)
    same = tool("config", "diff", "deployment/fake", "-o", "json")
    assert (same.code, same.items) == (0, []), same.err

    file.write_text(TEXT.replace("9", "7") + "token_budget: 512\nmax_seq_len: 2048\n")
    changed = {
        item["name"]: (item["left"], item["right"])
        for item in tool("config", "diff", "deployment/fake", "-o", "json").items
    }
    assert changed == {"max_queue": (9, 7), "token_budget": (2048, 512)}, "a flag still wins over the file"
    assert "mine.yaml:5" in tool("config", "diff", "deployment/fake", "-o", "wide").out
    assert {item["name"] for item in tool("config", "diff", "deployment/fake", str(file), "-o", "json").items} >= {
        "max_queue",
        "max_seq_len",
    }

    file.write_text("model: [")
    assert tool("config", "diff", "deployment/fake").code == ExitCode.INVALID
    file.unlink()
    gone = tool("config", "diff", "deployment/fake")
    assert (gone.code, "mine.yaml" in gone.err) == (ExitCode.INVALID, True)


def test_one_side_alone_is_compared_with_nothing(tool: Cli) -> None:
    said = tool("config", "diff", "orpheus")
    assert (said.code, "only a deployment can be compared" in said.err) == (ExitCode.USAGE, True)
    assert tool("config", "diff", "deployment/none").code == ExitCode.NOT_FOUND


@pytest.mark.parametrize(
    "words",
    [
        {"target": "orpheus:mini", "device": "cpu"},
        {"target": "pi05:mini", "port": 8123, "timeout": "90s", "name": "arm"},
        {"target": "orpheus", "sets": ["max_queue=7", "kv_cache.pages=512"], "remote_media": ["example.org"]},
        {"target": "bagel_cfg_parallel:mini", "no_console": True},
    ],
    ids=lambda words: words["target"],
)
def test_nothing_differs_right_after_a_start(runtime: Path, words: dict[str, Any]) -> None:
    words = {"port": free_port(), **words}
    spec = make_planned(UpOptions(**words)).spec
    assert differences(spec, config_now(spec)) == []
