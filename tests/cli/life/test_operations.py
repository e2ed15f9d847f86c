"""Commands cordon, uncordon, restart --rolling, scale and set on a deployment of fake children."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mstar_core.errors import ExitCode, UsageError
from mstarctl.commands.cordon import name_and_rank
from mstarctl.start.launch import Started, wait_ready

Cli = Callable[..., Any]
Launch = Callable[..., Started]


def nothing(snapshot: dict[str, Any]) -> None:
    """A view that shows nothing."""


def test_replicas_are_added_cordoned_renewed_and_removed(tool: Cli, start: Launch) -> None:
    wait_ready(start(max_concurrent_requests=4), nothing)
    alone = tool("cordon", "0")
    assert (alone.code, "rank 0 has no other replica" in alone.err) == (ExitCode.UNREACHABLE, True)
    grown = tool("scale", "fake", "--replicas", "2", "-o", "json")
    assert grown.items == [{"name": "fake", "state": "ready", "ranks": 2, "replicas": 2}]
    assert "1 of 1  starting rank 1" in grown.err and "max_concurrent_requests=N" in grown.err

    cordoned = tool("cordon", "fake", "1", "--wait", "-o", "json")
    assert cordoned.items == [{"name": "fake", "cordoned": [1]}] and "rank 1 has no request" in cordoned.err
    assert "cordoned: rank 1" in tool("ps").out
    assert "cordoned" in tool("describe", "rank/1").out
    assert tool("uncordon", "rank/1", "-o", "json").items == [{"name": "fake", "cordoned": []}]
    unknown = tool("cordon", "7")
    assert (unknown.code, "its ranks are 0, 1" in unknown.err) == (ExitCode.NOT_FOUND, True)

    rolled = tool("restart", "--rolling", "-o", "json")
    assert rolled.code == 0 and rolled.items[0]["state"] == "ready"
    assert [name for name in ("worker-0", "worker-1", "conductor", "api") if f"of 4  {name}" not in rolled.err] == []
    assert tool("scale", "--replicas", "1").code == 0
    none = tool("scale", "--replicas", "0")
    assert (none.code, "mstarctl down" in none.err) == (ExitCode.USAGE, True)


def test_limits_are_set_live_and_other_keys_are_refused_with_the_reason(tool: Cli, start: Launch) -> None:
    wait_ready(start(max_concurrent_requests=4), nothing)
    changed = tool("set", "fake", "max_queue=7", "api.timeout_s=30", "-o", "json").items
    assert [(item["name"], item["value"], item["before"]) for item in changed] == [
        ("max_queue", 7, 128),
        ("api.timeout_s", 30.0, 600.0),
    ]
    shown = tool("config", "show", "deployment/fake", "--resolved").out
    assert "set live at" in shown
    for words, text in (
        ("max_queu=7", "did you mean 'max_queue'?"),
        ("max_seq_len=64", "processes read it at their start"),
        ("max_concurrent_requests=5", "its replicas carry 4 requests"),
        ("max_queue=-1", "max_queue is -1"),
        ("max_queue", "sets no key"),
    ):
        refused = tool("set", words)
        assert (refused.code, text in refused.err) == (ExitCode.USAGE, True), refused.err


def test_operations_are_refused_while_the_deployment_drains(tool: Cli, start: Launch) -> None:
    wait_ready(start(), nothing)
    tool("drain", "--wait")
    for words in (("restart", "--rolling"), ("scale", "--replicas", "2")):
        refused = tool(*words)
        assert (refused.code, "mstarctl resume" in refused.err) == (ExitCode.UNREACHABLE, True)


def test_a_replica_that_does_not_start_fails_the_command(tool: Cli, start: Launch, play: Any) -> None:
    play(worker_1={"phase": "kv", "how": "error"})
    wait_ready(start(), nothing)
    failed = tool("scale", "--replicas", "2")
    assert (failed.code, "worker-1 did not start" in failed.err) == (ExitCode.START_FAILED, True)


@pytest.mark.parametrize("words", [["a", "b", "1"], ["name"], ["name", "-1"], ["name", "x"]])
def test_a_cordon_needs_one_rank(words: list[str]) -> None:
    with pytest.raises(UsageError, match="is not a deployment and a rank"):
        name_and_rank(words)


def test_the_name_before_a_rank_may_be_left_out() -> None:
    assert name_and_rank(["3"]) == (None, 3)
    assert name_and_rank(["fake", "rank/3"]) == ("fake", 3)


def test_a_deployment_sleeps_and_wakes_by_command(tool: Cli, start: Launch) -> None:
    wait_ready(start(max_concurrent_requests=4), nothing)
    slept = tool("sleep", "fake", "--level", "2", "-o", "json")
    assert slept.code == 0 and slept.items[0]["state"] == "sleeping"
    assert slept.items[0]["sleep"]["freed"] == {"worker-0": 100}
    assert "fake sleeps at level 2: 100 B of its devices are free" in slept.err
    assert "sleeping" in tool("ps").out and "level 2, 100 B free" in tool("ps").out
    assert "given_back       100 B" in tool("describe", "rank/0").out
    refused = tool("restart", "--rolling")
    assert (refused.code, "mstarctl wake fake" in refused.err) == (ExitCode.UNREACHABLE, True)
    unknown = tool("wake", "--nodes", "LLN")
    assert (unknown.code, "did you mean 'LLM'" in unknown.err) == (ExitCode.NOT_FOUND, True)
    woken = tool("wake", "-o", "json")
    assert (woken.code, woken.items[0]["state"]) == (0, "ready")
    again = tool("wake")
    assert (again.code, "nothing sleeps" in again.err) == (ExitCode.UNREACHABLE, True)
    assert tool("sleep", "--level", "3").code == ExitCode.USAGE
