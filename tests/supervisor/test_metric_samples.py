"""Samples of the admin socket for a deployment on two hosts."""

from __future__ import annotations

from mstar_core.observe.metrics import exposition, made_by
from mstar_core.supervisor.telemetry.metric_samples import socket_samples
from tests.top.models import qwen
from tests.top.streams import Simulation


def page(simulation: Simulation) -> list[str]:
    """Return the lines of the metrics page."""
    simulation.hello()
    samples = socket_samples(simulation.store, "ready", 0)
    return exposition(made_by("socket"), samples).decode().splitlines()


def starting_with(lines: list[str], name: str) -> list[str]:
    return [line for line in lines if line.startswith(name)]


def test_series_of_two_hosts_differ_by_their_label() -> None:
    lines = page(Simulation(qwen(), requests=3, hosts={1: "node-b"}))
    gpus = [line.partition("}")[0] for line in starting_with(lines, "mstar_gpu_utilisation")]
    assert gpus == [f'mstar_gpu_utilisation{{gpu="0",host="{host}"' for host in ("local", "node-b")]
    (busy,) = starting_with(lines, 'mstar_rank_busy{host="node-b"')
    assert 'rank="1"' in busy
    assert starting_with(lines, 'mstar_process_cores{component="worker-1",host="node-b"} 0.93')
    assert 'mstar_host_memory_bytes{host="node-b",state="total"} 274877906944.0' in lines
    assert 'mstar_host_network_bytes_per_second{direction="in",host="node-b"} 4194304.0' in lines
    assert starting_with(lines, 'mstar_host_round_trip_seconds{host="node-b"} 0.0002')


def test_a_host_that_does_not_report_is_down_and_has_no_loads() -> None:
    simulation = Simulation(qwen(), requests=3, hosts={1: "node-b"})
    simulation.host_states = {"node-b": ("lost", "silent for 10 s")}
    lines = page(simulation)
    assert starting_with(lines, "mstar_host_up") == [
        'mstar_host_up{host="local"} 1.0',
        'mstar_host_up{host="node-b"} 0.0',
    ]
    assert not starting_with(lines, 'mstar_host_memory_bytes{host="node-b"')


def test_one_host_has_the_same_labels() -> None:
    lines = page(Simulation(qwen(), requests=3))
    assert all('host="local"' in line for line in starting_with(lines, "mstar_rank_busy"))
