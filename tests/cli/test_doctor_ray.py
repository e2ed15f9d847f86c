"""Findings of `doctor --ray` and rows of `hosts --ray` for clusters of all kinds, and without a cluster."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from mstar_core.cluster.facts import ClusterView, HostFacts, HostGpu
from mstar_core.errors import ExitCode
from mstarctl.commands.doctor_ray import cluster_findings, reach
from mstarctl.objects.cluster import COLUMNS, cluster_cells, cluster_items
from mstarctl.output import render_table
from tests.cli.conftest import Cli
from tests.fakes.commands import output_of

GIB = 2**30
NEEDED = {"python": "3.12.4", "mstarctl": "0.4.0", "ray": "2.60.0", "mstar-orpheus": "0.4.0"}
GPU = HostGpu(index=0, name="NVIDIA H100", key="GPU-0", total_bytes=80 * GIB, free_bytes=79 * GIB)


def host(name: str, number: int, **fields: Any) -> HostFacts:
    """Return a host with one free GPU and the packages of this one."""
    facts = HostFacts(
        name=name,
        node=f"9f0{number}",
        address=f"10.0.0.{number}",
        is_local=number == 1,
        cpus=8.0,
        free_cpus=6.0,
        memory_total=64 * GIB,
        memory_free=32 * GIB,
        gpus=(GPU,),
        gpu_count=1.0,
        free_gpus=1.0,
        versions={**NEEDED, "python": "3.12.9", "cuda": "12.8"},
        interfaces={"lo": "127.0.0.1", "eth0": f"10.0.0.{number}"},
    )
    return msgspec.structs.replace(facts, **fields)


def findings(other: HostFacts | None = None, *, local: HostFacts | None = None, took_s: float | None = 0.0003) -> Any:
    """Return (state, detail) of each finding by name."""
    hosts: Sequence[HostFacts] = [local or host("node-a", 1), *([other] if other is not None else [])]
    view = ClusterView(address="10.0.0.1:6379", version="2.60.0", hosts=tuple(hosts))
    return {each.name: (each.state, each.detail) for each in cluster_findings(view, NEEDED, lambda address: took_s)}


def test_a_good_cluster_has_no_fault() -> None:
    checked = findings(host("node-b", 2))
    assert {state for state, _ in checked.values()} == {"ok"}
    assert checked["ray"][1] == "Ray 2.60.0 at 10.0.0.1:6379, 2 hosts"
    assert "10.0.0.2:40000 answers in 0.3 ms" in checked["node-b ports"][1] and "node-a ports" not in checked
    assert "on eth0" in checked["node-b network"][1]


@pytest.mark.parametrize(
    ("fields", "name", "state", "words"),
    [
        ({"fault": "mstarctl is not installed"}, "node-b", "failed", "not installed"),
        (
            {"versions": {**NEEDED, "mstarctl": "0.3.0"}},
            "node-b versions",
            "failed",
            "0.3.0; this host has mstarctl 0.4",
        ),
        ({"versions": {**NEEDED, "python": "3.11.2"}}, "node-b versions", "failed", "python 3.11.2"),
        (
            {"versions": {name: NEEDED[name] for name in ("python", "mstarctl", "ray")}},
            "node-b plugins",
            "warn",
            "mstar-orpheus missing; their models need there: pip install mstar-orpheus==0.4.0",
        ),
        ({"versions": {**NEEDED, "cuda": "12.2"}}, "node-b cuda", "warn", "that of this host is for 12.8"),
        ({"gpus": (), "gpu_count": 0.0}, "node-b gpus", "n/a", "none found"),
        ({"free_gpus": 0.0}, "node-b gpus", "warn", "0 of 1 not reserved"),
        (
            {"gpus": (msgspec.structs.replace(GPU, holder="'a' (pid 7)"),)},
            "node-b gpus",
            "warn",
            "held by deployment 'a' (pid 7)",
        ),
        ({"memory_free": GIB}, "node-b memory", "warn", "1.0 GiB available"),
        ({"address": "127.0.0.1"}, "node-b network", "warn", "reached from the host itself alone"),
        ({"address": "8.8.4.4"}, "node-b network", "warn", "public address"),
    ],
)
def test_what_a_host_lacks_is_a_finding(fields: dict[str, Any], name: str, state: str, words: str) -> None:
    checked = findings(host("node-b", 2, **fields))
    assert checked[name][0] == state and words in checked[name][1]


def test_a_firewall_is_a_finding_with_the_key_to_set() -> None:
    state, detail = findings(host("node-b", 2), took_s=None)["node-b ports"]
    assert state == "warn" and "ray.ports" in detail


def test_a_cluster_without_this_host_is_refused() -> None:
    state, detail = findings(local=host("node-c", 3))["ray"]
    assert state == "failed" and "ray start --address=10.0.0.1:6379" in detail


def test_one_host_may_have_a_loopback_address() -> None:
    assert findings(local=host("node-a", 1, address="127.0.0.1"))["node-a network"][0] == "ok"


def test_a_host_that_refuses_is_reached() -> None:
    took_s = reach("127.0.0.1")
    assert took_s is not None and took_s >= 0.0


def test_the_table_of_a_cluster_has_what_ray_offers() -> None:
    faulty = host("node-b", 2, fault="mstarctl is not installed", versions={})
    title, first, second = render_table([cluster_cells(each) for each in (host("node-a", 1), faulty)], COLUMNS)
    assert (
        "6/8" in first and "1/1" in first and "H100" in first and "32.0 GiB of 64.0 GiB" in first and "0.4.0" in first
    )
    assert "unusable" in second and "mstarctl is not installed" in second and title.endswith("NOTE")


def test_programs_get_all_facts_of_a_cluster() -> None:
    view = ClusterView(address="a:1", version="2.60.0", hosts=(host("node-a", 1),))
    (item,) = cluster_items(view)
    assert item["free_gpus"] == 1.0 and item["gpus"][0]["total_bytes"] == 80 * GIB and item["state"] == "ok"


def test_a_cluster_and_a_deployment_exclude_each_other(cli: Cli) -> None:
    said = cli("hosts", "a", "--ray", "auto")
    assert said.code == ExitCode.USAGE and "omit 'a' or --ray" in said.err


@pytest.mark.parametrize("command", ["hosts", "doctor"])
def test_an_address_without_a_cluster_says_so(cli: Cli, command: str) -> None:
    said = cli(command, "--ray", "127.0.0.1:1")
    assert said.code == ExitCode.UNREACHABLE and "no Ray cluster at 127.0.0.1:1" in said.err


def test_the_commands_do_not_import_ray() -> None:
    code = "import sys, mstarctl.commands.hosts, mstarctl.commands.doctor; print('ray' in sys.modules)"
    assert output_of([sys.executable, "-c", code]).strip() == "False"
