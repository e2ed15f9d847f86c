"""Keys that change while a deployment runs."""

from __future__ import annotations

from typing import Any

import pytest

from mstar_core.config.deployment import DeploymentSpec, NodePlacement, Plan, RankPlan
from mstar_core.config.live import LIVE_SETTINGS, take_live, with_live
from mstar_core.config.resolved import ApiConfig
from mstar_core.config.schema import values_of
from mstar_core.errors import ConfigError


def spec(**fields: Any) -> DeploymentSpec:
    """Two replicas of one node."""
    plan = Plan(
        ranks=tuple(RankPlan(rank=rank, device="cpu", nodes=("LLM",)) for rank in (0, 1)),
        placements=(NodePlacement(node="LLM", replicas=((0,), (1,))),),
    )
    return DeploymentSpec(name="d", model="m", plugin="p", run_dir="/r", log_dir="", plan=plan, **fields)


def test_values_of_the_top_and_of_a_section_change_and_say_when() -> None:
    changed = with_live(spec(), {"max_queue": 7, "api.timeout_s": 5}, "noon")
    assert (changed.max_queue, changed.api.timeout_s, changed.api.max_n) == (7, 5.0, ApiConfig().max_n)
    assert changed.source("max_queue") == changed.source("api.timeout_s") == "set live at noon"


def test_ranks_keep_the_slots_that_they_were_started_with() -> None:
    low = with_live(spec(max_concurrent_requests=8), {"max_concurrent_requests": 2}, "noon")
    assert (low.max_concurrent_requests, low.rank_slots) == (2, 8)
    high = with_live(low, {"max_concurrent_requests": 16}, "one")
    assert (high.max_concurrent_requests, high.rank_slots) == (16, 8)
    with pytest.raises(ConfigError, match="17") as refused:
        with_live(high, {"max_concurrent_requests": 17}, "two")
    assert "8 slots" in refused.value.detail and "at most 16" in refused.value.hint


@pytest.mark.parametrize(
    ("key", "value", "title", "hint"),
    [
        ("max_queu", 1, "unknown key 'max_queu'", "max_queue"),
        ("max_queue", -1, "max_queue is -1", ""),
        ("max_queue", "many", "max_queue is 'many'", ""),
        ("max_concurrent_requests", None, "max_concurrent_requests is None", "at most 64"),
        ("max_seq_len", 512, "max_seq_len cannot be changed while the deployment runs", "--set max_seq_len="),
        ("api.tls_cert", "x", "api.tls_cert cannot be changed while the deployment runs", "mstarctl reload"),
    ],
)
def test_what_cannot_be_set_is_refused_with_the_way_to_do_it(key: str, value: Any, title: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        with_live(spec(), {key: value}, "noon")
    assert refused.value.title == title and hint in refused.value.hint


def test_the_api_takes_live_keys_and_no_other() -> None:
    newer = with_live(spec(api=ApiConfig(port=9, max_n=3)), {"max_queue": 7}, "noon")
    taken = take_live(spec(), newer)
    differences = {key for key, value in values_of(taken).items() if value != values_of(spec())[key]}
    assert differences == {"max_queue", "api.max_n"} and differences <= LIVE_SETTINGS.keys()
