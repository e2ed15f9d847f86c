"""Every fault of a file in one message, and refusals of everything but regular text files."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from mstar_core.config.files.load import read_file
from mstar_core.config.files.parse import MOST_BYTES
from mstar_core.errors import ConfigError
from tests.config.conftest import Resolve

THREE = """model: toy
max_seq_len: 1
node_groups:
  - node_names: [LLM, vocodr]
    ranks: [0]
kv_cache:
  pages: many
  page_sise: 16
"""


def test_all_faults_are_reported_in_the_order_of_the_lines(resolved: Resolve) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(THREE)
    error = caught.value
    assert error.title == "toy.yaml has 4 faults"
    lines = error.detail.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["toy.yaml:2", "toy.yaml:4", "toy.yaml:7", "toy.yaml:8"]
    assert "allowed is integer >= 16" in lines[0] and "did you mean 'vocoder'?" in lines[1]
    assert "kv_cache.pages is 'many'" in lines[2] and "did you mean 'page_size'?" in lines[3]
    assert [fault.facts["key"] for fault in error.facts["faults"]] == [
        "max_seq_len",
        "node_groups.0.node_names.1",
        "kv_cache.pages",
        "kv_cache.page_sise",
    ]


def test_a_file_for_another_model_reports_no_faults_of_its_nodes(resolved: Resolve) -> None:
    with pytest.raises(ConfigError, match="the file is for model 'orpheus', requested is 'toy'") as caught:
        resolved("model: orpheus\nnode_groups:\n  - node_names: [snac_decoder]\n    ranks: [0]\n")
    assert "mstarctl up orpheus" in caught.value.hint


def test_a_long_list_of_faults_is_cut(resolved: Resolve) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(THREE + "".join(f"unknown{number}: 1\n" for number in range(40)))
    assert caught.value.title == "toy.yaml has 44 faults"
    assert caught.value.detail.splitlines()[-1] == "and 24 more"


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (pipe, "it is a pipe, not a regular file"),
        (device, "it is a device, not a regular file"),
        (unix_socket, "it is a socket, not a regular file"),
        (Path.mkdir, "is a directory, not a deployment file"),
        (lambda path: path.write_bytes(b"\x80\x81"), "the file is not UTF-8 text"),
        (lambda path: path.write_text("a: [" + "1," * MOST_BYTES), "the file is too large"),
    ],
    ids=["pipe", "device", "socket", "directory", "binary", "large"],
)
def test_what_is_no_deployment_file_is_refused_at_once(tmp_path: Path, make: object, words: str) -> None:
    assert callable(make)
    make(tmp_path / "file.yaml")
    with pytest.raises(ConfigError) as caught:
        read_file(tmp_path / "file.yaml")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "name: !!python/object:os.system x\n",
        "name: !mine x\n",
        "api: !!set {a}\n",
        "node_groups: !x [1]\n",
        "!root\nmodel: toy\n",
        "? !key a\n: 1\n",
    ],
)
def test_tags_are_refused_with_their_line(text: str, resolved: Resolve) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved("# one\n" + text)
    assert "Located(" not in str(caught.value) and "tag" in caught.value.title
    assert (caught.value.facts["file"], caught.value.facts["line"]) == ("toy.yaml", 2)
