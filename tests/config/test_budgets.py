"""Memory shares of a plan: divided evenly, declared by groups, refused with numbers if the sum is too large."""

from __future__ import annotations

import pytest

from mstar_core.config.files.placement import make_plan
from mstar_core.config.schema import values_of
from mstar_core.errors import ConfigError
from mstar_core.plugin import ModelSpec
from mstarctl.plugins import Plugins
from mstarctl.start.target import find, parse_set, resolve_target
from tests.config.conftest import Resolve

REPLICAS = "model: toy\nnode_groups:\n  - node_names: [LLM, vocoder]\n    ranks: [0, 1]\n"
APART = """model: toy
node_groups:
  - node_names: [LLM]
    ranks: [0]
    memory_fraction: {first}
  - node_names: [vocoder]
    ranks: [1]
    memory_fraction: {second}
"""
ONE = ("cuda:0", "cuda:0")
TWO = ("cuda:0", "cuda:1")


def shares(spec: ModelSpec, resolved: Resolve, text: str, devices: tuple[str, ...], *sets: str) -> list[float | None]:
    return [rank.memory_fraction for rank in make_plan(spec, resolved(text, *sets), devices).ranks]


def test_ranks_of_one_device_divide_it_evenly_and_those_of_two_do_not(spec: ModelSpec, resolved: Resolve) -> None:
    assert shares(spec, resolved, REPLICAS, TWO) == [0.85, 0.85]
    assert shares(spec, resolved, REPLICAS, ONE) == [0.425, 0.425]
    assert shares(spec, resolved, REPLICAS, ONE, "kv_cache.memory_fraction=0.5") == [0.25, 0.25]


def test_what_a_group_declares_stays_and_the_others_get_the_rest(spec: ModelSpec, resolved: Resolve) -> None:
    assert shares(spec, resolved, APART.format(first=0.6, second=0.3), ONE) == [0.6, 0.3]
    assert shares(spec, resolved, APART.format(first=0.6, second="null"), ONE) == [0.6, pytest.approx(0.25)]


def test_more_than_a_device_has_is_refused_with_the_parts(spec: ModelSpec, resolved: Resolve) -> None:
    with pytest.raises(ConfigError, match="ranks on cuda:0 take 1.4 of its memory") as caught:
        make_plan(spec, resolved(APART.format(first=0.8, second=0.6)), ONE)
    assert caught.value.detail == "rank 0 0.8 + rank 1 0.6" and caught.value.facts["line"] == 3
    assert shares(spec, resolved, APART.format(first=0.8, second=0.6), TWO) == [0.8, 0.6]


def test_a_rank_for_which_nothing_is_left_is_named(spec: ModelSpec, resolved: Resolve) -> None:
    with pytest.raises(ConfigError, match="no memory of cuda:0 is left for rank 1"):
        make_plan(spec, resolved(APART.format(first=0.9, second="null")), ONE)


def test_two_groups_that_disagree_about_a_rank_are_refused(spec: ModelSpec, resolved: Resolve) -> None:
    text = APART.format(first=0.5, second=0.4).replace("ranks: [1]", "ranks: [0]")
    with pytest.raises(ConfigError, match="rank 0 has two different memory shares") as caught:
        make_plan(spec, resolved(text), ("cuda:0",))
    assert "0.5" in caught.value.detail and "0.4" in caught.value.detail


def test_shares_of_nodes_are_checked(spec: ModelSpec, resolved: Resolve) -> None:
    config = resolved(REPLICAS, "kv_cache.share={LLM: 0.4}")
    assert config.kv_cache.share == {"LLM": 0.4} and values_of(config)["kv_cache.share"] == {"LLM": 0.4}
    for bad, words in (("{LLN: 0.4}", "no node 'LLN' with a cache"), ("{LLM: 2}", "kv_cache.share.LLM is 2")):
        with pytest.raises(ConfigError, match=words):
            resolved(REPLICAS, f"kv_cache.share={bad}")


def test_quantization_is_refused_where_nothing_can_run_it(spec: ModelSpec, resolved: Resolve) -> None:
    assert make_plan(spec, resolved(REPLICAS, "quantization=fp8"), TWO).ranks
    assert make_plan(spec, resolved(REPLICAS, "quantization=fp8", "dtype=float32"), ("cpu",)).ranks
    with pytest.raises(ConfigError, match="on a GPU") as caught:
        make_plan(spec, resolved(REPLICAS, "quantization=fp8", "dtype=float32"), TWO)
    assert "--set dtype=float32" in caught.value.detail


@pytest.mark.parametrize(
    ("share", "words"),
    [("{Thinker: 0.6, Talker: 0.5}", "assigns 1.1 of rank 0's cache"), ("{Thinker: 1}", "nothing is left for Talker")],
)
def test_shares_that_cannot_add_up_on_a_rank_are_refused_at_planning(share: str, words: str) -> None:
    target = find("qwen3omni_single_gpu", Plugins.discover())
    fits = resolve_target(target, [parse_set("kv_cache.share={Thinker: 0.6}")])
    assert make_plan(target.spec, fits, ("cuda:0",)).ranks[0].memory_fraction == 0.85
    with pytest.raises(ConfigError, match=words) as caught:
        make_plan(target.spec, resolve_target(target, [parse_set(f"kv_cache.share={share}")]), ("cuda:0",))
    assert "\nThinker " in caught.value.detail
