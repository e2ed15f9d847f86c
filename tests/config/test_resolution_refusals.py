"""Invalid deployment files: each error names file, line, key and the nearest valid name."""

from __future__ import annotations

import pytest

from mstar_core.config.files.placement import make_plan
from mstar_core.errors import ConfigError
from mstar_core.plugin import ModelSpec
from tests.config.conftest import Resolve

GOOD = """\
model: toy
max_seq_len: 512
node_groups:
  - node_names: [LLM, vocoder]
    ranks: [0]
"""

TWO = """\
model: toy
node_groups:
  - node_names: [LLM]
    ranks: [0, 1]
    graph_walks: [prefill, guided]
  - node_names: [LLM]
    ranks: [1]
    graph_walks: [decode]
  - node_names: [vocoder]
    ranks: [0]
"""

REFUSED = {
    "unknown key": (GOOD + "max_seqlen: 4\n", 6, "max_seqlen", "max_seq_len"),
    "unknown nested key": (GOOD + "kv_cache:\n  pagse: 4\n", 7, "kv_cache.pagse", "pages"),
    "unknown group key": (GOOD.replace("ranks: [0]", "rank: [0]"), 5, "node_groups.0.rank", "ranks"),
    "unknown node": (GOOD.replace("vocoder]", "vocodr]"), 4, "node_groups.0.node_names.1", "vocoder"),
    "unknown walk": (TWO.replace("[decode]", "[decod]"), 8, "node_groups.1.graph_walks.0", "decode"),
    "walk twice by alias": (
        TWO.replace("[prefill, guided]", "[prefill, first]"),
        5,
        "node_groups.0.graph_walks.1",
        None,
    ),
    "missing key": (GOOD.replace("    ranks: [0]\n", ""), 4, "node_groups.0.ranks", None),
    "no groups": ("model: toy\n", 1, "node_groups", None),
    "empty groups": ("model: toy\nnode_groups: []\n", 2, "node_groups", None),
    "wrong type": (GOOD.replace("512", "many"), 2, "max_seq_len", None),
    "a flag for a number": (GOOD.replace("512", "true"), 2, "max_seq_len", None),
    "a number too small": (GOOD.replace("512", "0"), 2, "max_seq_len", None),
    "a float for an integer": (GOOD.replace("512", "512.5"), 2, "max_seq_len", None),
    "not finite": (GOOD + "kv_cache:\n  memory_fraction: .nan\n", 7, "kv_cache.memory_fraction", None),
    "a share over one": (GOOD + "kv_cache: {memory_fraction: 1.5}\n", 6, "kv_cache.memory_fraction", None),
    "unknown choice": (GOOD + "dtype: bfloat61\n", 6, "dtype", "bfloat16"),
    "pool fixed twice": (GOOD + "kv_cache:\n  pages: 4\n  tokens: 9\n", 8, "kv_cache.tokens", None),
    "ice servers in one text": (GOOD + "api:\n  realtime_ice_servers: stun:a\n", 7, "api.realtime_ice_servers", None),
    "ice server of another scheme": (
        GOOD + "api:\n  realtime_ice_servers:\n  - urls: [stun:a, 'https://b']\n",
        8,
        "api.realtime_ice_servers.0.urls.1",
        None,
    ),
    "ice server without urls": (
        GOOD + "api:\n  realtime_ice_servers:\n  - username: ann\n",
        8,
        "api.realtime_ice_servers.0.urls",
        None,
    ),
    "turn server without a user": (
        GOOD + "api:\n  realtime_ice_servers:\n  - urls: ['turn:a:3478']\n",
        8,
        "api.realtime_ice_servers.0.credential_file",
        None,
    ),
    "turn server with a password of no user": (
        GOOD + "api:\n  realtime_ice_servers:\n  - urls: ['turn:a']\n    credential_file: f\n",
        8,
        "api.realtime_ice_servers.0.username",
        None,
    ),
    "turn server with two secrets": (
        GOOD
        + "api:\n  realtime_ice_servers:\n  - urls: ['turn:a']\n    username: u\n    credential_file: f\n"
        + "    secret_file: g\n",
        11,
        "api.realtime_ice_servers.0.secret_file",
        None,
    ),
    "stun server with a user": (
        GOOD + "api:\n  realtime_ice_servers:\n  - urls: ['stun:a']\n    username: u\n",
        9,
        "api.realtime_ice_servers.0.username",
        None,
    ),
    "password in the file": (
        GOOD + "api:\n  realtime_ice_servers:\n  - urls: ['turn:a']\n    credential: pw\n",
        9,
        "api.realtime_ice_servers.0.credential",
        "credential_file",
    ),
    "rank twice": (GOOD.replace("[0]", "[0, 0]"), 5, "node_groups.0.ranks.1", None),
    "negative rank": (GOOD.replace("[0]", "[-1]"), 5, "node_groups.0.ranks.0", None),
    "gap in ranks": (GOOD.replace("[0]", "[0, 2]"), 4, "node_groups.0.ranks", None),
    "tp does not divide": (
        TWO.replace("graph_walks: [prefill, guided]", "graph_walks: [prefill, guided]\n    tp_size: 3"),
        6,
        "node_groups.0.tp_size",
        None,
    ),
    "not tensor-parallel": (GOOD.replace("[0]", "[0, 1]\n    tp_size: 2"), 6, "node_groups.0.tp_size", None),
    "heads do not divide": (
        "model: toy\nnode_groups:\n  - node_names: [LLM]\n    ranks: [0, 1, 2]\n"
        "    tp_size: 3\n  - {node_names: [vocoder], ranks: [0]}\n",
        5,
        "node_groups.0.tp_size",
        None,
    ),
    "widths do not divide": (
        "model: toy\nnode_groups:\n  - node_names: [LLM]\n    ranks: [0, 1, 2, 3]\n"
        "    tp_size: 4\n  - {node_names: [vocoder], ranks: [0]}\n",
        5,
        "node_groups.0.tp_size",
        None,
    ),
    "placed twice": (GOOD + "  - node_names: [vocoder]\n    ranks: [0]\n", 6, "node_groups.1.node_names.0", None),
    "placed twice in a walk": (TWO.replace("[decode]", "[decode, guided]"), 6, "node_groups.1.node_names.0", None),
    "a walk without a place": (
        TWO.replace("[decode]", "[prefill]").replace("[prefill, guided]", "[guided]"),
        2,
        "node_groups",
        None,
    ),
    "a node without a place": (GOOD.replace("[LLM, vocoder]", "[LLM]"), 3, "node_groups", None),
    "a walk that uses no node": (TWO.replace("[decode]", "[decode, chunk]"), 8, "node_groups.1.graph_walks.1", None),
    "unknown option": (GOOD + "model_kwargs:\n  layrs: 3\n", 7, "model_kwargs.layrs", "layers"),
    "option of another type": (GOOD + "model_kwargs:\n  layers: two\n", 7, "model_kwargs.layers", None),
    "another model": (GOOD.replace("model: toy", "model: tyo"), 1, "model", None),
    "no embedded checkpoint": (GOOD.replace("model: toy", "model: toy:tiny"), 1, "model", None),
    "unknown variant": (GOOD.replace("model: toy", "model: toy:tyny"), 1, "model", "tiny"),
    "bad name": (GOOD + "name: a/b\n", 6, "name", None),
    "key twice": (GOOD + "model: toy\n", 6, "model", None),
    "a key that is not a string": (GOOD + "1: 2\n", 6, "1", None),
    "a merge key": (GOOD + "api: &a\n  port: 1\nkv_cache:\n  <<: *a\n", 9, "<<", None),
    "a date": (GOOD + "name: 2026-01-01\n", 6, "name", None),
    "a list for a section": (GOOD + "api: [1]\n", 6, "api", None),
    "no yaml": (GOOD + "name: [\n", 7, "", None),
    "a tag": (GOOD + "name: !!python/object:os.system x\n", 6, "name", None),
    "empty": ("", 1, "", None),
    "a list": ("- 1\n", 1, "", None),
    "port out of range": (GOOD + "api:\n  port: 70000\n", 7, "api.port", None),
}


def test_a_rank_in_two_tensor_parallel_groups_is_refused_at_planning(spec: ModelSpec, resolved: Resolve) -> None:
    text = TWO.replace("[0, 1]", "[0, 1]\n    tp_size: 2").replace("ranks: [1]", "ranks: [1, 2]\n    tp_size: 2")
    with pytest.raises(ConfigError, match="rank 1 is in two tensor-parallel groups") as caught:
        make_plan(spec, resolved(text), ("cpu",))
    assert (caught.value.facts["line"], caught.value.facts["key"]) == (7, "node_groups.1.ranks")


@pytest.mark.parametrize(("text", "line", "key", "near"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_names_file_line_key_and_the_nearest(
    text: str, line: int, key: str, near: str | None, resolved: Resolve
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(text)
    facts = caught.value.facts
    assert (facts["file"], facts["line"], facts["key"]) == ("toy.yaml", line, key)
    if near is not None:
        assert facts["nearest"] == near


def test_an_anchor_bomb_is_refused(resolved: Resolve) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 8)}]" for i in range(1, 9)]
    with pytest.raises(ConfigError, match="nests or repeats too much"):
        resolved("\n".join(lines))


def test_a_rank_that_no_device_backs_is_refused_at_its_line(spec: ModelSpec, resolved: Resolve) -> None:
    config = resolved(TWO)
    with pytest.raises(ConfigError, match="no device backs rank 1") as caught:
        make_plan(spec, config, ("cuda:0",))
    assert (caught.value.facts["line"], caught.value.facts["key"]) == (3, "node_groups.0.ranks")


def test_a_refused_override_names_its_flag(resolved: Resolve) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(GOOD, "kv_cache.pages=0")
    assert "--set kv_cache.pages=0" in caught.value.detail
    assert caught.value.facts["key"] == "kv_cache.pages"


@pytest.mark.parametrize("words", ["node_groups.3.ranks=[0]", "max_seq_len.x=1", "node_groups.a=1"])
def test_an_override_of_a_place_that_is_not_there_is_refused(words: str, resolved: Resolve) -> None:
    with pytest.raises(ConfigError):
        resolved(GOOD, words)
