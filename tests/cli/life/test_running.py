"""Commands ps, describe, logs, events, drain, resume and down on a deployment of fake children."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from mstar_core.errors import ExitCode, MstarError
from mstar_core.host.run_dir import RunDirectory
from mstarctl.start.launch import Started, wait_ready

Cli = Callable[..., Any]
Launch = Callable[..., Started]


def nothing(snapshot: dict[str, Any]) -> None:
    """A view that shows nothing."""


def test_a_running_deployment_is_listed_described_drained_and_stopped(tool: Cli, start: Launch) -> None:
    started = start()
    wait_ready(started, nothing)
    item = tool("ps", "-o", "json").items[0]
    assert (item["name"], item["state"], item["ranks"], item["pid"]) == ("fake", "ready", 1, started.process.pid)
    assert tool("ps", "-o", "name").out == "deployment/fake\n"
    assert f"127.0.0.1:{started.spec.api.port}" in tool("ps").out

    assert tool("describe", "deployment/fake", "-o", "json").items[0]["children"][0]["name"] == "conductor"
    assert "LLM" in tool("describe", "rank/0").out
    wrong = tool("describe", "node/LMM")
    assert (wrong.code, "did you mean 'node/LLM'?" in wrong.err) == (ExitCode.NOT_FOUND, True)

    assert tool("resume").code == 0
    assert tool("drain", "--wait", "-o", "json").items == [{"name": "fake", "state": "draining", "is_drained": True}]
    assert tool("ps", "-o", "json").items[0]["state"] == "draining"
    assert tool("resume", "-o", "json").items == [{"name": "fake", "state": "ready"}]
    guessed, wide = tool("describe", "fake"), tool("describe", "rank/0", "-o", "wide")
    assert guessed.out.startswith("fake  ready") and "shown with -o wide" not in wide.out
    unknown = tool("describe", "nothing")
    assert (unknown.code, "write KIND/nothing" in unknown.err) == (ExitCode.NOT_FOUND, True)

    kinds = [json.loads(line)["type"] for line in tool("events", "-o", "json").out.splitlines()]
    assert kinds[0] == "deployment.starting" and "deployment.draining" in kinds
    assert tool("events", "--type", "deployment.ready").out.count("deployment.ready") == kinds.count("deployment.ready")
    assert "deployment.ready" in tool("logs", "--from", "supervisor").out
    assert tool("logs", "--from", "supervisor", "--grep", "no such words").out == ""
    assert tool("logs", "--level", "loud").code == ExitCode.USAGE

    documents = list(yaml.safe_load_all(tool("events", "-o", "yaml").out))
    assert [event["type"] for event in documents] == kinds
    names = tool("events", "--type", "deployment.*", "-o", "name").out.splitlines()
    assert names == [f"event/{event['n']}" for event in documents if event["type"].startswith("deployment.")]
    lines = list(yaml.safe_load_all(tool("logs", "--from", "supervisor", "-o", "yaml").out))
    assert {line["from"] for line in lines} == {"supervisor"} and "deployment.starting" in lines[0]["message"]
    assert not [line for line in lines if " detail= " in line["message"] or line["message"].endswith("=")]
    nameless = tool("logs", "-o", "name")
    assert (nameless.code, nameless.out, "-o json or -o yaml" in nameless.err) == (ExitCode.USAGE, "", True)
    no_gpu = tool("describe", "gpu/0")
    assert no_gpu.code == ExitCode.NOT_FOUND
    assert "it runs rank 0 on cpu" in no_gpu.err and "try: mstarctl describe rank/0; mstarctl doctor" in no_gpu.err
    assert tool("logs", "--from", "wrker").code == ExitCode.NOT_FOUND

    assert tool("down", "--grace", "60s").code == 0
    assert started.process.wait(60) == 0
    again = tool("down", "fake")
    assert (again.code, "is not running" in again.err) == (ExitCode.NOT_FOUND, True)
    assert tool("ps").code == 0 and tool("ps", "fake", "-o", "json").items[0]["state"] == "stopped"
    assert "deployment.stopped" in tool("logs", "fake").out


def test_a_failed_start_stays_visible_with_its_cause(tool: Cli, start: Launch, play: Callable[..., None]) -> None:
    play(worker_0={"phase": "kv", "how": "error"})
    with pytest.raises(MstarError):
        wait_ready(start(), nothing)
    said = tool("ps", "fake", "-o", "json")
    assert (said.code, said.items[0]["state"]) == (ExitCode.START_FAILED, "failed")
    assert said.items[0]["cause"]["message"] == "worker-0 lacks a file"
    assert "worker-0 lacks a file" in tool("ps").out and tool("ps").code == 0
    described = tool("describe", "deployment/fake").out
    assert "use another folder" in described and "worker-0.log:" in described
    assert "worker-0 lacks a file" in tool("logs", "fake", "--level", "error").out


def test_a_start_that_stands_still_is_exit_7(tool: Cli, start: Launch, play: Callable[..., None]) -> None:
    play(worker_0={"phase": "kv", "how": "hang"})
    with pytest.raises(MstarError) as stalled:
        wait_ready(start(stall_s=10.0), nothing)  # the others may take so long on a busy machine
    assert stalled.value.exit_code is ExitCode.TIMED_OUT and stalled.value.code == "stalled"
    assert "worker-0 made no progress in phase kv for 10 s" in stalled.value.title
    assert tool("ps", "fake", "-o", "json").items[0]["cause"]["code"] == "stalled"


def test_what_a_killed_supervisor_left_is_called_stale(tool: Cli, start: Launch) -> None:
    started = start()
    wait_ready(started, nothing)
    os.kill(started.process.pid, signal.SIGKILL)
    started.process.wait(60)
    said = tool("ps")
    assert "stale" in said.out and "cleans it up" in said.err
    assert RunDirectory.of("fake").holder() is None
    assert "stale deployments" in tool("doctor").out


def test_with_nothing_running_every_verb_says_so(tool: Cli) -> None:
    for argv in (["down"], ["drain"], ["resume"], ["restart"], ["logs"], ["events"], ["call", "--text", "x"]):
        said = tool(*argv)
        assert (said.code, "no deployment is running" in said.err) == (ExitCode.NOT_FOUND, True), argv
    nothing_to_do = tool("down", "--all")
    assert (nothing_to_do.code, "no deployment is running" in nothing_to_do.err) == (ExitCode.NOT_FOUND, True)
    empty = tool("ps", "-o", "json")
    assert (empty.code, empty.items) == (0, [])


def test_doctor_tells_every_check_and_fails_on_none_here(tool: Cli) -> None:
    said = tool("doctor", "-o", "json")
    actual = {item["name"]: item["state"] for item in said.items}
    assert said.code == 0, said.out
    assert {"python", "torch", "gpu", "memory", "/dev/shm", "run directory", "plugin orpheus"} <= set(actual)
    assert set(actual.values()) <= {"ok", "warn", "n/a"}
