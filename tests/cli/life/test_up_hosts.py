"""Plans of `up --ray`: where ranks are placed, what is shown, and what is refused with the host's name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mstar_core.cluster.facts import HostFacts
from mstar_core.errors import ExitCode
from mstar_core.host.gpu_locks import FOLDER_VARIABLE, acquire_gpus, release
from mstar_core.host.hardware.gpus import Gpu
from mstarctl.authoring.config_file import differences
from mstarctl.commands.config import config_now
from mstarctl.start.options import UpOptions
from mstarctl.start.plan import make_planned
from tests.cli.life.conftest import own_port
from tests.cli.life.test_gpus import checkpoint
from tests.fakes.cluster import RAY, FakeSurvey, host
from tests.fakes.ports import free_port

Cli = Callable[..., Any]
Cluster = Callable[..., FakeSurvey]
PAGE = Path(__file__).resolve().parents[3] / "docs" / "hosts.md"

SPLIT = """model: orpheus
node_groups:
  - node_names: [LLM]
    ranks: [0]
  - node_names: [snac_decoder]
    ranks: [1]
"""
PARALLEL = """model: qwen3_omni
node_groups:
  - node_names: [Thinker]
    ranks: [0, 1]
    tp_size: 2
  - node_names: [audio_encoder, vision_encoder, Talker, Code2Wav]
    ranks: [2]
"""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runtime: Path) -> Cluster:
    """Let `up` see a cluster of these hosts, the first of which is this one, with a torch for GPUs."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    monkeypatch.setattr("mstarctl.start.plan.torch_version", lambda: "2.11.0+cu130")

    def seen(*hosts: HostFacts) -> FakeSurvey:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        survey = FakeSurvey(*hosts)
        monkeypatch.setattr("mstarctl.start.hosts.cluster.survey", survey)
        return survey

    return seen


def two_hosts(here: int = 2, there: int = 2) -> tuple[HostFacts, HostFacts]:
    """Return this host and another one, with so many GPUs."""
    return host("gpu-a", here), host("gpu-b", there, number=2)


def planned_places(**words: Any) -> list[str]:
    """Return the place of each rank as `up` with these options plans it."""
    spec = make_planned(UpOptions(**{"ray": "auto", "port": free_port(), **words})).spec
    return [rank.place for rank in spec.plan.ranks]


def file_of(tmp_path: Path, text: str) -> Path:
    """Write a deployment file."""
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def test_ranks_are_placed_here_first_and_then_on_as_few_hosts_as_possible(cluster: Cluster) -> None:
    survey = cluster(host("gpu-a", 1), host("gpu-b", 1, number=2), host("gpu-c", 4, number=3))
    assert planned_places(target="orpheus:tiny", replicas=4) == ["cuda:0", *(f"gpu-c cuda:{i}" for i in range(3))]
    address, distributions, folders = survey.calls[0]
    assert (address, set(distributions), folders) == ("auto", {"mstarctl", "mstar-orpheus", "ray"}, ())


def test_spread_places_replicas_on_different_hosts(cluster: Cluster) -> None:
    cluster(*two_hosts())
    places = planned_places(target="orpheus:tiny", replicas=3, sets=["ray.spread=true"])
    assert places == ["cuda:0", "gpu-b cuda:0", "cuda:1"]


def test_a_replica_stays_on_one_host_and_so_does_a_group(cluster: Cluster, tmp_path: Path) -> None:
    file = file_of(tmp_path, PARALLEL)
    cluster(*two_hosts(2, 3))
    assert planned_places(target=str(file)) == ["gpu-b cuda:0", "gpu-b cuda:1", "gpu-b cuda:2"]
    cluster(*two_hosts(1, 2))
    assert planned_places(target=str(file)) == ["gpu-b cuda:0", "gpu-b cuda:1", "cuda:0"]


def test_replicas_of_a_split_model_each_have_a_host(cluster: Cluster, tmp_path: Path) -> None:
    cluster(*two_hosts())
    places = planned_places(target=str(file_of(tmp_path, SPLIT)), replicas=2)
    assert places == ["cuda:0", "cuda:1", "gpu-b cuda:0", "gpu-b cuda:1"]


def test_listed_devices_are_used_in_their_order(cluster: Cluster, tmp_path: Path) -> None:
    cluster(*two_hosts())
    file = str(file_of(tmp_path, SPLIT))
    assert planned_places(target=file, gpus="gpu-b:1,gpu-a:0") == ["gpu-b cuda:1", "cuda:0"]
    assert planned_places(target=file, gpus="gpu-b,10.0.0.2") == ["gpu-b cuda:0", "gpu-b cuda:1"]
    assert planned_places(target=file, gpus="gpu-b:0,gpu-b") == ["gpu-b cuda:0", "gpu-b cuda:1"]
    assert planned_places(target=file, gpus="gpu-b:0,gpu-b:0") == ["gpu-b cuda:0"] * 2
    assert planned_places(target=file, sets=["ray.devices=[gpu-b:1, 'gpu-a:1']"]) == ["gpu-b cuda:1", "cuda:1"]


def test_equal_indices_on_different_hosts_do_not_share_memory(cluster: Cluster, tmp_path: Path) -> None:
    cluster(*two_hosts())
    file = str(file_of(tmp_path, SPLIT))
    shares = {}
    for gpus in ("gpu-a:0,gpu-b:0", "gpu-a:0,gpu-a:0"):
        spec = make_planned(UpOptions(target=file, ray="auto", gpus=gpus, port=free_port())).spec
        shares[gpus] = [rank.memory_fraction for rank in spec.plan.ranks]
    apart, together = shares.values()
    assert apart == [pytest.approx(2 * share) for share in together]


def test_on_the_cpu_all_ranks_are_here_unless_listed_or_spread(cluster: Cluster, tmp_path: Path) -> None:
    cluster(*two_hosts(0, 0))
    file = str(file_of(tmp_path, SPLIT))
    assert planned_places(target=file) == ["cpu", "cpu"]
    assert planned_places(target=file, gpus="gpu-a:cpu,gpu-b:cpu") == ["cpu", "gpu-b cpu"]
    assert planned_places(target=file, gpus="gpu-b:cpu", replicas=2) == ["gpu-b cpu"] * 4
    spread = planned_places(target=file, replicas=2, sets=["ray.spread=true"])
    assert spread == ["cpu", "cpu", "gpu-b cpu", "gpu-b cpu"]


def test_a_number_of_gpus_chooses_the_file_over_all_hosts(cluster: Cluster) -> None:
    cluster(*two_hosts(1, 2))
    planned = make_planned(UpOptions(target="qwen3_omni", ray="auto", gpus="auto:2", port=free_port()))
    assert [rank.place for rank in planned.spec.plan.ranks] == ["gpu-b cuda:0", "gpu-b cuda:1"]
    assert "auto:2 chose" in planned.devices.why


def test_the_record_lists_hosts_and_locks_the_gpus_of_this_one(cluster: Cluster, tmp_path: Path) -> None:
    cluster(*two_hosts())
    file = str(file_of(tmp_path, SPLIT))
    spec = make_planned(UpOptions(target=file, ray="auto", gpus="gpu-b:0,gpu-a:1", port=free_port())).spec
    assert [(h.name, h.title, h.address, h.node) for h in spec.hosts] == [
        ("", "gpu-a", "10.0.0.1", "node-gpu-a"),
        ("gpu-b", "gpu-b", "10.0.0.2", "node-gpu-b"),
    ]
    assert spec.gpus == {"cuda:1": "GPU-gpu-a-1"} and (spec.host_of(0), spec.host_of(1)) == ("gpu-b", "")
    alone = make_planned(UpOptions(target="orpheus:tiny", ray="auto", port=free_port())).spec
    assert [h.title for h in alone.hosts] == ["gpu-a"]


def test_without_ray_no_cluster_is_asked_and_the_record_has_no_hosts(cluster: Cluster) -> None:
    survey = cluster(*two_hosts())
    spec = make_planned(UpOptions(target="orpheus:tiny", device="cpu", port=free_port(), replicas=2)).spec
    assert survey.calls == [] and spec.hosts == ()
    assert [(rank.rank, rank.place) for rank in spec.plan.ranks] == [(0, "cpu"), (1, "cpu")]


def test_a_dry_run_shows_the_host_of_each_rank(tool: Cli, cluster: Cluster, tmp_path: Path) -> None:
    cluster(*two_hosts())
    file = str(file_of(tmp_path, SPLIT))
    argv = ("up", file, "--dry-run", "--ray", "10.0.0.1:6379", "--gpus", "gpu-a:0,gpu-b:1", *own_port())
    said = tool(*argv)
    assert said.code == 0, said.err
    assert "rank 0  gpu-a cuda:0  LLM" in said.out and "rank 1  gpu-b cuda:1  snac_decoder" in said.out
    assert "hosts   gpu-a 10.0.0.1, gpu-b 10.0.0.2" in said.out
    assert "device gpu-a cuda:0, gpu-b cuda:1 (as listed)" in said.err
    item = tool(*argv, "-o", "json").items[0]
    assert [(rank["host"], rank["device"]) for rank in item["ranks"]] == [("gpu-a", "cuda:0"), ("gpu-b", "cuda:1")]
    assert item["hosts"] == [{"name": "gpu-a", "address": "10.0.0.1"}, {"name": "gpu-b", "address": "10.0.0.2"}]


def test_the_network_between_the_hosts_gives_their_addresses(cluster: Cluster) -> None:
    fast = {"eth0": "10.0.0.9", "ib0": "192.168.7.3"}
    cluster(host("gpu-a", 1, interfaces={"ib0": "192.168.7.2"}), host("gpu-b", 1, number=2, interfaces=fast))
    for network in ("ib0", "192.168.7.0/24"):
        options = UpOptions(
            target="orpheus:tiny", ray="auto", replicas=2, sets=[f"ray.network={network}"], port=free_port()
        )
        assert [h.address for h in make_planned(options).spec.hosts] == ["192.168.7.2", "192.168.7.3"]


def test_the_smallest_gpu_of_all_hosts_sets_the_number_of_requests(cluster: Cluster) -> None:
    cluster(host("gpu-a", 1, gib=141), host("gpu-b", 1, number=2, gib=79.1))
    for replicas, most in ((1, 128), (2, 64)):
        options = UpOptions(target="orpheus:tiny", ray="auto", replicas=replicas, port=free_port())
        assert make_planned(options).spec.max_concurrent_requests == most


def test_warnings_name_slow_paths_and_hosts_that_are_left_out(cluster: Cluster, tmp_path: Path) -> None:
    cluster(*two_hosts(), host("old", 2, number=3, versions={}))
    file = str(file_of(tmp_path, SPLIT))

    def cautions(**words: Any) -> str:
        return "\n".join(make_planned(UpOptions(ray="auto", port=free_port(), **words)).spec.cautions)

    apart = cautions(target=file, gpus="gpu-a:0,gpu-b:0")
    assert "pass through host memory: --tensor-comm-protocol TCP or RDMA" in apart
    assert "host old is left out: mstarctl is not installed there" in apart
    assert "host memory" not in cautions(target=file, gpus="gpu-a:0,gpu-a:1")
    assert "host memory" not in cautions(target=file, replicas=2)
    parallel = str(file_of(tmp_path, PARALLEL))
    assert "ranks 0, 1 are one tensor-parallel group" in cautions(target=parallel, gpus="gpu-a:0,gpu-b:0,gpu-b:1")


REFUSED: dict[str, tuple[list[HostFacts], list[str], list[str]]] = {
    "no such host": ([*two_hosts()], ["--gpus", "gpu-c:0"], ["no host 'gpu-c'", "did you mean"]),
    "no such gpu": ([*two_hosts()], ["--gpus", "gpu-b:5"], ["host gpu-b has no GPU 5", "GPU 0, 1"]),
    "too few": ([*two_hosts(1, 1)], ["--gpus", "gpu-b,gpu-b"], ["gpu-b has too few free GPUs", "gpu-b: 1 GPU"]),
    "too many replicas": (
        [*two_hosts(1, 2)],
        ["--replicas", "4"],
        ["no device is free for the new replicas", "gpu-a: 1 GPU", "gpu-b: 2 GPUs"],
    ),
    "auto too many": ([*two_hosts()], ["--gpus", "auto:5"], ["5 GPUs of the cluster", "gpu-b: 2 GPUs", "auto:4"]),
    "no gpu": ([*two_hosts(0, 0)], ["--device", "cuda"], ["the cluster offers no GPU", "gpu-b: no GPU"]),
    "reserved": (
        [host("gpu-a", 2), host("gpu-b", 2, number=2, free_gpus=0.0)],
        ["--gpus", "gpu-b:1"],
        ["gpu-b has too few free GPUs", "0 of 2 GPUs free"],
    ),
    "no mstarctl": (
        [host("gpu-a", 1), host("gpu-b", 1, number=2, fault="Ray's Python has no mstarctl")],
        ["--gpus", "gpu-b"],
        ["host gpu-b cannot run ranks", "has no mstarctl", "pip install mstarctl=="],
    ),
    "reserved name": (
        [host("gpu-a", 1), host("local", 1, number=2)],
        ["--gpus", "gpu-a:0,local:0"],
        ["host local cannot run ranks", "means the host of the supervisor", "give it another host name"],
    ),
    "no plugin": (
        [host("gpu-a", 1), host("gpu-b", 1, number=2, versions={**host("x").versions, "mstar-orpheus": ""})],
        ["--gpus", "gpu-b"],
        ["host gpu-b", "mstar-orpheus is not installed there", "mstar-orpheus=="],
    ),
    "another version": (
        [host("gpu-a", 1), host("gpu-b", 1, number=2, versions={**host("x").versions, "mstarctl": "0.0.1"})],
        ["--gpus", "gpu-b"],
        ["host gpu-b", "it has mstarctl 0.0.1"],
    ),
    "another python": (
        [host("gpu-a", 1), host("gpu-b", 1, number=2, versions={**host("x").versions, "python": "3.9.1"})],
        ["--gpus", "gpu-b"],
        ["host gpu-b", "it has python 3.9.1", "use Python 3."],
    ),
    "another ray": (
        [host("gpu-a", 1), host("gpu-b", 1, number=2, versions={**host("x").versions, "ray": "2.9.0"})],
        ["--gpus", "gpu-b"],
        ["host gpu-b", f"it has ray 2.9.0, and this host has {RAY}"],
    ),
    "not in the cluster": ([host("gpu-b", 1, number=2)], [], ["this host is not in the Ray cluster", "ray start"]),
    "no such interface": (
        [*two_hosts(1, 1)],
        ["--set", "ray.network=eth7", "--replicas", "2"],
        ["host gpu-a has no interface 'eth7'", "eth0 10.0.0.1", "did you mean 'eth0'?"],
    ),
    "no address": (
        [*two_hosts(1, 1)],
        ["--set", "ray.network=192.168.0.0/24"],
        ["host gpu-a has no address in 192.168.0.0/24"],
    ),
    "loopback": (
        [host("gpu-a", 1, address="127.0.0.1"), host("gpu-b", 1, number=2)],
        ["--replicas", "2"],
        ["other hosts cannot reach host gpu-a", "set ray.network"],
    ),
    "few ports": (
        [*two_hosts()],
        ["--set", "ray.ports=20000-20003"],
        ["ray.ports 20000-20003 has 4 ports", "need 8"],
    ),
    "plain index": ([*two_hosts()], ["--gpus", "0,1"], ["--gpus contains '0'", "HOST:INDEX"]),
    "two kinds": ([*two_hosts()], ["--gpus", "gpu-a:0,gpu-b:cpu"], ["devices are of two kinds"]),
    "cpu and gpus": ([*two_hosts()], ["--gpus", "gpu-a:0", "--device", "cpu"], ["of two kinds", "--device is cpu"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_hosts_lack_is_refused_with_their_name(tool: Cli, cluster: Cluster, case: str) -> None:
    hosts, argv, words = REFUSED[case]
    cluster(*hosts)
    said = tool("up", "orpheus:tiny", "--dry-run", "--ray", "auto", *argv, *own_port())
    assert said.code not in (ExitCode.DONE, ExitCode.INTERNAL), said.err
    assert [word for word in words if word not in said.err] == [], said.err


def test_a_fault_of_the_file_names_its_line(tool: Cli, cluster: Cluster, tmp_path: Path) -> None:
    cluster(*two_hosts())
    file = file_of(tmp_path, f"{SPLIT}ray:\n  address: auto\n  devices: [gpu-a:0, gpu-x:0]\n")
    said = tool("up", str(file), "--dry-run", *own_port())
    assert "mine.yaml:9" in said.err and "no host 'gpu-x'" in said.err


@pytest.mark.parametrize("key", ["devices=[gpu-a]", "spread=true", "network=eth0", "ports=20000-20100"])
def test_keys_of_several_hosts_need_an_address(tool: Cli, cluster: Cluster, key: str) -> None:
    cluster(*two_hosts())
    said = tool("up", "orpheus:tiny", "--dry-run", "--set", f"ray.{key}", *own_port())
    assert said.code == ExitCode.INVALID
    assert "ray.address is not set" in said.err and "--ray auto" in said.err


def test_devices_of_other_hosts_need_ray(tool: Cli, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mstarctl.start.plan.count_gpus", lambda: 2)
    said = tool("up", "orpheus:tiny", "--dry-run", "--gpus", "gpu-a:0", *own_port())
    assert "HOST:INDEX needs --ray" in said.err


def test_weights_must_be_on_each_host(tool: Cli, cluster: Cluster, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "weights", 1)
    survey = cluster(host("gpu-a", 1), host("gpu-b", 1, number=2, missing=(str(folder),)))
    argv = ("up", "orpheus", "--weights", str(folder), "--dry-run", "--ray", "auto")
    assert tool(*argv, *own_port()).code == 0
    assert survey.calls[0][2] == (str(folder),)
    said = tool(*argv, "--replicas", "2", *own_port())
    assert f"host gpu-b has no folder {folder}" in said.err and "same path" in said.err


def test_weights_that_do_not_fit_the_gpus_of_all_hosts_are_refused(tool: Cli, cluster: Cluster, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "weights", 100)
    cluster(*two_hosts(1, 1))
    file = file_of(tmp_path, SPLIT)
    argv = ("up", str(file), "--weights", str(folder), "--dry-run", "--ray", "auto", *own_port())
    assert tool(*argv).code == 0
    cluster(host("gpu-a", 1, gib=40), host("gpu-b", 1, number=2, gib=40))
    said = tool(*argv)
    assert "orpheus does not fit on 2 GPUs" in said.err and "weights need 100.0 GiB; 80.0 GiB of 80.0" in said.err


def test_a_gpu_that_another_deployment_holds_is_not_offered(tool: Cli, cluster: Cluster) -> None:
    held = host("gpu-b", 2, number=2)
    first, second = held.gpus
    gpus = (msgspec.structs.replace(first, holder="deployment 'bagel' (pid 7)"), second)
    cluster(host("gpu-a", 0), msgspec.structs.replace(held, gpus=gpus))
    assert planned_places(target="orpheus:tiny") == ["gpu-b cuda:1"]
    said = tool("up", "orpheus:tiny", "--dry-run", "--ray", "auto", "--gpus", "gpu-b:0", *own_port())
    assert "GPU 0 of host gpu-b is in use" in said.err and "'bagel' (pid 7)" in said.err


def test_a_gpu_of_this_host_that_is_locked_meanwhile_is_refused(tool: Cli, cluster: Cluster) -> None:
    cluster(*two_hosts())
    locks = acquire_gpus({"cuda:0": "GPU-gpu-a-0"}, "bagel")
    said = tool("up", "orpheus:tiny", "--dry-run", "--ray", "auto", "--gpus", "gpu-a:0", *own_port())
    release(locks)
    assert "GPU 0 is in use" in said.err and "bagel" in said.err


@pytest.mark.parametrize(
    ("protocol", "device", "words"),
    [("TCP", "eth7", "host gpu-b has no interface 'eth7'"), ("RDMA", "mlx5_9", "host gpu-b has no RDMA adapter")],
)
def test_an_interface_that_a_host_lacks_is_named(
    tool: Cli, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, protocol: str, device: str, words: str
) -> None:
    """The checks of this host are left out: it has neither the interface nor the library."""
    monkeypatch.setattr("mstarctl.start.plan.check_transport", lambda *arguments: None)
    here = host("gpu-a", 1, interfaces={"eth7": "10.0.0.1"}, adapters=("mlx5_9",))
    cluster(here, host("gpu-b", 1, number=2))
    argv = ("--tensor-comm-protocol", protocol, "--tcp-transfer-device", device, *own_port())
    said = tool("up", str(file_of(tmp_path, SPLIT)), "--dry-run", "--ray", "auto", *argv)
    assert said.code == ExitCode.INVALID and words in said.err


def test_gpus_of_this_host_are_numbered_as_its_processes_see_them(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(host("gpu-a", 3))
    cards = [Gpu(name="", driver="", free=0, total=0, uuid=f"GPU-gpu-a-{index}") for index in range(3)]
    monkeypatch.setattr("mstarctl.start.hosts.cluster.gpus", lambda: cards)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    spec = make_planned(UpOptions(target="orpheus:tiny", ray="auto", gpus="gpu-a:0", port=free_port())).spec
    assert spec.gpus == {"cuda:0": "GPU-gpu-a-2"}


def test_torch_without_cuda_offers_no_gpu_here(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(*two_hosts())
    monkeypatch.setattr("mstarctl.start.plan.torch_version", lambda: "2.11.0+cpu")
    assert planned_places(target="orpheus:tiny") == ["gpu-b cuda:0"]


def test_right_after_a_start_the_file_and_the_deployment_are_equal(cluster: Cluster, tmp_path: Path) -> None:
    cluster(*two_hosts())
    file = str(file_of(tmp_path, SPLIT))
    spec = make_planned(UpOptions(target=file, ray="auto", gpus="gpu-a:0,gpu-b:0", port=free_port())).spec
    assert differences(spec, config_now(spec)) == []


def test_the_commands_and_the_file_of_the_page_plan_on_two_hosts(tool: Cli, cluster: Cluster, tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (file,) = re.findall(r"```yaml\n(model: .*?)```", text, re.DOTALL)
    lists = re.findall(r"`--gpus (\S+)`", text)
    assert "gpu1:0,gpu2:0" in lists and "gpu1:cpu,gpu2:cpu" in lists
    split = str(file_of(tmp_path, file))
    argvs = [("orpheus", "--ray", "auto", *words) for words in (("--gpus", "auto:2"), ("--replicas", "2"))]
    argvs += [(split, "--gpus", places) for places in lists if places.startswith("gpu1:")]
    for argv in (*argvs, (split,)):
        cluster(host("gpu1", 1), host("gpu2", 1, number=2))
        said = tool("up", *argv, "--dry-run", *own_port())
        assert said.code == 0, (argv, said.err)
        assert "gpu1" in said.out and "gpu2" in said.out, (argv, said.out)
