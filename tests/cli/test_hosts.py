"""`hosts`, `describe host/NAME` and the hosts in `describe deployment`, of a deployment on two hosts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mstar_core.admin.payloads import plain
from mstar_core.errors import ExitCode
from mstar_core.observe.frames import PARTS, HostStatus, SessionStatus
from mstarctl.client import Known
from mstarctl.objects.deployment import deployment_lines
from mstarctl.output.facts import facts_text
from tests.cli.conftest import Cli, Said
from tests.fakes.admin import HEAD, canned
from tests.top.models import qwen
from tests.top.streams import Simulation

LOST = {"node-b": ("waiting", "silent for 10 s; waits for a host with 1 GPU")}


def snapshot(simulation: Simulation) -> dict[str, Any]:
    """Return the snapshot that the admin socket answers with."""
    simulation.hello()
    store = simulation.store
    parts = {part: {key: plain(item) for key, item in store.part(part).items()} for part in PARTS}
    return {"t": simulation.t, "deployment": plain(store.deployment), **parts, "values": {}}


def two_hosts() -> Simulation:
    """Return a deployment of two ranks; the second one runs on node-b."""
    return Simulation(qwen(), requests=3, hosts={1: "node-b"})


Ask = Callable[..., Said]


@pytest.fixture
def ask(cli: Cli, tmp_path: Path) -> Ask:
    """Run a command for the deployment of a simulation."""

    def call(simulation: Simulation, *words: str, answers: Any = (), **parts: Any) -> Said:
        state = {**snapshot(simulation), **parts}
        head = {**HEAD, **state["deployment"]}
        path = tmp_path / "a.sock"
        path.unlink(missing_ok=True)
        with canned(path, {"/v1/": (200, head), "/v1/snapshot": (200, state), **dict(answers)}):
            return cli(*words, "--socket", str(path))

    return call


def test_hosts_shows_where_ranks_run_and_what_each_host_has(ask: Ask) -> None:
    said = ask(two_hosts(), "hosts")
    title, local, other = said.out.splitlines()
    assert said.code == ExitCode.DONE and "NOTE" not in title
    assert local.startswith("local (node-a)") and "10.0.0.1" in local
    words = other.split()
    assert words[:5] == ["node-b", "10.0.0.2", "ready", "1", "cuda:0"]
    assert "2.1/8" in other and "48.0 GiB of 256.0 GiB" in other and "0.21 ms" in other and "0.4.0" in other


def test_a_host_without_an_agent_shows_its_state_and_what_it_waits_for(ask: Ask) -> None:
    simulation = two_hosts()
    simulation.host_states = LOST
    row = ask(simulation, "hosts").out.splitlines()[2]
    assert "waiting" in row and "silent for 10 s; waits for a host with 1 GPU" in row


def test_hosts_of_one_host_is_one_row(ask: Ask) -> None:
    """The supervisor of one host reports loads alone."""
    loads = HostStatus(cores=[0.5, 0.5], memory_used=2**30, memory_total=2**31)
    title, row = ask(Simulation(qwen(), requests=3), "hosts", hosts={"local": plain(loads)}).out.splitlines()
    assert "ADDRESS" not in title and row.split()[:5] == ["local", "ready", "0,", "1", "cuda:0,"]
    assert "1.0/2" in row and "1.0 GiB of 2.0 GiB" in row


def test_programs_get_base_units(ask: Ask) -> None:
    items = json.loads(ask(two_hosts(), "hosts", "-o", "json").out)["items"]
    assert [item["name"] for item in items] == ["local", "node-b"]
    assert items[1]["memory_total"] == 256 * 2**30 and items[1]["ranks"] == [1] and items[1]["age_s"] == 0.0
    assert list(items[1]["gpus"]) == ["node-b/0"]
    assert ask(two_hosts(), "hosts", "-o", "name").out.split() == ["host/local", "host/node-b"]


@pytest.mark.parametrize("name", ["node-b", "10.0.0.2"])
def test_describe_host_shows_its_agent_gpus_and_processes(ask: Ask, name: str) -> None:
    said = ask(two_hosts(), "describe", f"host/{name}")
    assert said.out.splitlines()[0] == "host node-b of qwen3_omni  ready"
    assert "pid 5101, life 1" in said.out and "ray 2.60.0" in said.out
    assert "NVIDIA H100" in said.out and "worker-1" in said.out and "worker-0" not in said.out


def test_old_readings_of_a_lost_host_are_called_old(ask: Ask) -> None:
    simulation = two_hosts()
    simulation.host_states = LOST
    out = ask(simulation, "describe", "host/node-b").out
    assert "12.0 s old" in out and "silent for 10 s" in out


def test_an_unknown_host_names_the_nearest(ask: Ask) -> None:
    said = ask(two_hosts(), "describe", "host/node-c")
    assert said.code == ExitCode.NOT_FOUND and "did you mean 'host/node-b'?" in said.err


def test_describe_shows_the_host_of_a_rank_and_of_a_gpu(ask: Ask) -> None:
    rank = ask(two_hosts(), "describe", "rank/1").out
    assert "host             node-b" in rank and "node-b/0" in rank
    gpu = json.loads(ask(two_hosts(), "describe", "gpu/node-b/0", "-o", "json").out)["items"][0]
    assert gpu["host"] == "node-b" and gpu["index"] == 0 and gpu["held_by"] is None


def test_describe_deployment_tells_hosts_ranks_and_links_apart() -> None:
    def lines(simulation: Simulation) -> str:
        return "\n".join(deployment_lines(Known(name="a", state="ready", pid=1, snapshot=snapshot(simulation))))

    several = lines(two_hosts())
    assert "  node-b          10.0.0.2  ready  rank 1" in several
    assert "  1   node-b cuda:0" in several and "  0   local  cuda:0" in several
    assert "; from local to node-b" in several
    assert "on node-b" in several
    assert "hosts\n" not in lines(Simulation(qwen(), requests=3))


def test_logs_of_a_host_are_those_of_its_processes(ask: Ask) -> None:
    sources = ("api", "worker-0", "worker-1", "agent-node-b", "supervisor")
    lines = [{"from": source, "line": f"line of {source}"} for source in sources]

    def shown(host: str) -> list[str]:
        out = ask(two_hosts(), "logs", "--host", host, answers={"/v1/logs": (200, lines)}).out
        return [row.split("line of ")[1] for row in out.splitlines()]

    assert shown("node-b") == ["worker-1", "agent-node-b"]
    assert shown("local") == ["api", "worker-0", "supervisor"]
    assert "did you mean 'host/node-b'?" in ask(two_hosts(), "logs", "--host", "node-c").err


def test_an_event_of_a_host_begins_with_its_name() -> None:
    facts = {"host": "node-b", "address": "10.0.0.2", "why": "silent for 10 s"}
    assert facts_text(facts) == "node-b address 10.0.0.2 (silent for 10 s)"
    assert facts_text({"child": "worker-1", "host": "node-b"}) == "worker-1 host node-b"


def test_describe_session_shows_its_speaker_and_lease(ask: Ask) -> None:
    simulation = Simulation(qwen(), requests=3)
    t = snapshot(simulation)["t"]
    session = SessionStatus(id="sess_1", speaks="interrupted", began=t - 40, interrupts=2, lease_ends=t + 30)
    sessions = {"realtime/sess_1": plain(session)}
    lines = ask(simulation, "describe", "session/sess_1", sessions=sessions).out.splitlines()
    assert lines[0] == "session sess_1 of qwen3_omni"
    facts = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[1:]}
    assert (facts["speaks"], facts["interrupts"], facts["lease_left"], facts["age"]) == (
        *("interrupted", "2"),
        *("30.0 s", "40.0 s"),
    )
    missing = ask(simulation, "describe", "session/sess_2", sessions=sessions)
    assert missing.code == ExitCode.NOT_FOUND and "session/sess_1" in missing.err
