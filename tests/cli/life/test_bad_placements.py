"""Placements that cannot be served are refused before the start, each with its line and what to change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mstar_core.config.files.load import read_text
from mstar_core.errors import ConfigError, ExitCode
from mstarctl.plugins import Plugins
from mstarctl.start.target import resolve_with
from tests.cli.life.conftest import own_port

Cli = Callable[..., Any]

DIVIDED = {
    "orpheus": ("LLM", 5, "KV heads"),
    "bagel": ("LLM", 3, "KV heads"),
    "qwen3_omni": ("Thinker", 3, "KV heads"),
    "pi05": ("LLM", 3, "heads"),
}
"""By model: a node of several heads, and a tp_size that does not divide them."""


@pytest.mark.parametrize("model", DIVIDED)
def test_a_tp_size_that_does_not_divide_a_node_is_refused_at_its_line(model: str) -> None:
    node, size, what = DIVIDED[model]
    spec = Plugins.discover().model(model)
    others = ", ".join(other.name for other in spec.nodes if other.of is None and other.name != node)
    ranks = ", ".join(map(str, range(size)))
    text = (
        f"model: {model}\nnode_groups:\n  - node_names: [{node}]\n    ranks: [{ranks}]\n    tp_size: {size}\n"
        f"  - {{node_names: [{others}], ranks: [0]}}\n"
    )
    with pytest.raises(ConfigError, match="does not divide") as error:
        resolve_with(spec, read_text(text, "file.yaml"))
    facts = error.value.facts
    assert (facts["file"], facts["line"], facts["key"]) == ("file.yaml", 5, "node_groups.0.tp_size")
    assert what in error.value.title and node in error.value.title and "divisor" in error.value.hint


def test_experts_are_divided_by_their_values_and_named() -> None:
    spec = Plugins.discover().model("qwen3_omni")
    sizes = dict(spec.node("Thinker").parallel_sizes)
    assert sizes["values of an expert"] % 2 == 0
    text = (
        "model: qwen3_omni\nnode_groups:\n  - {node_names: [Talker], ranks: [0, 1, 2, 3, 4, 5, 6], tp_size: 7}\n"
        "  - {node_names: [audio_encoder, vision_encoder, Thinker, Code2Wav], ranks: [0]}\n"
    )
    with pytest.raises(ConfigError, match="'Talker'"):
        resolve_with(spec, read_text(text, "file.yaml"))


MIXED = """\
model: orpheus:tiny
node_groups:
  - node_names: [LLM]
    ranks: [0, 1, 2]
    tp_size: 3
  - {node_names: [snac_decoder], ranks: [4]}
transport:
  protocol: SHM
  device: eth0
"""
REPAIRS = (
    (
        "tp_size is 3 and does not divide",
        "file.yaml:5",
        "ranks: [0, 1, 2]\n    tp_size: 3",
        "ranks: [0, 1]\n    tp_size: 2",
    ),
    ("rank 4 is used and rank 3 is not", "file.yaml:6", "ranks: [4]", "ranks: [0]"),
    ("transport.protocol is SHM", "file.yaml:9", "  device: eth0\n", ""),
)
"""Errors of the file in the order in which they are reported: title, place, and the repair."""


def test_a_file_that_mixes_errors_is_refused_until_each_is_repaired(tool: Cli, tmp_path: Path) -> None:
    text, file = MIXED, tmp_path / "file.yaml"
    words = ("up", "--config", "file.yaml", "--dry-run", "--device", "cpu", *own_port())
    for what, place, wrong, right in REPAIRS:
        file.write_text(text, encoding="utf-8")
        said = tool(*words)
        assert said.code == ExitCode.INVALID and what in said.err and place in said.err, said.err
        text = text.replace(wrong, right)
    file.write_text(text, encoding="utf-8")
    said = tool(*words)
    assert said.code == 0, said.err
