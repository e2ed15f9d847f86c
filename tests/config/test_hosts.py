"""The `ray:` section of a file: what it accepts, and the place of each fault."""

from __future__ import annotations

import pytest

from mstar_core.config.hosts import HostDevice, host_device, port_range
from mstar_core.errors import ConfigError
from tests.config.conftest import Resolve
from tests.config.test_resolution_refusals import GOOD


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("gpu-a:1", HostDevice(host="gpu-a", index=1)),
        ("10.0.0.2:0", HostDevice(host="10.0.0.2", index=0)),
        ("gpu-a.example:cpu", HostDevice(host="gpu-a.example", is_cpu=True)),
        ("gpu-a", HostDevice(host="gpu-a")),
        ("[fd00::1]:2", HostDevice(host="fd00::1", index=2)),
        ("[fd00::1]", HostDevice(host="fd00::1")),
        ("gpu-a:", None),
        (":0", None),
        ("gpu-a:cuda:0", None),
        ("gpu-a:x", None),
        ("gpu a", None),
        ("fd00::1:2", None),
        ("", None),
    ],
)
def test_a_device_names_a_host_and_what_it_uses_there(text: str, device: HostDevice | None) -> None:
    assert host_device(text) == device


def test_the_section_is_read(resolved: Resolve) -> None:
    ray = resolved(
        GOOD + "ray: {address: '10.0.0.1:6379', devices: [a:0, b, b], network: 10.0.0.0/24, ports: 20000-20009}\n"
    ).ray
    assert ray.devices == ("a:0", "b", "b") and ray.port_range == (20000, 20009)
    assert resolved(GOOD).ray.port_range is None


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("address: head", "ray.address", "10.0.0.1:6379"),
        ("address: head:0", "ray.address", "auto"),
        ("address: autp", "ray.address", "auto"),
        ("devices: [a:0, 'a:cuda0']", "ray.devices.1", "HOST:INDEX"),
        ("network: 10.0.0.0/33", "ray.network", "eth0"),
        ("network: an interface with a long name", "ray.network", "eth0"),
        ("ports: '20000'", "ray.ports", "20000-20999"),
        ("ports: 20999-20000", "ray.ports", "20000-20999"),
        ("ports: 0-10", "ray.ports", "20000-20999"),
        ("ports: 60000-70000", "ray.ports", "20000-20999"),
        ("devicse: [a]", "ray.devicse", "devices"),
        ("spread: 3", "ray.spread", "boolean"),
    ],
)
def test_each_fault_names_its_line_and_what_is_allowed(resolved: Resolve, text: str, key: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resolved(GOOD + f"ray:\n  {text}\n")
    error = raised.value
    assert (error.facts["line"], error.facts["key"]) == (7, key)
    assert words in f"{error.detail} {error.hint}"


def test_all_faults_of_the_section_are_reported_together(resolved: Resolve) -> None:
    with pytest.raises(ConfigError, match="has 3 faults"):
        resolved(GOOD + "ray:\n  address: head\n  devices: ['a:x']\n  ports: all\n")


def test_a_range_contains_its_ends() -> None:
    assert port_range("1-65535") == (1, 65535) and port_range("7-7") == (7, 7)
    assert port_range("7") is port_range("-7") is port_range("a-b") is None
