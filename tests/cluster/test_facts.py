"""Address of a host in a network between hosts."""

from __future__ import annotations

from mstar_core.cluster.facts import HostFacts

HOST = HostFacts(
    name="b",
    node="1",
    address="10.0.0.2",
    interfaces={"lo": "127.0.0.1", "eth0": "10.0.0.2", "ib0": "10.1.4.2", "x": ""},
)


def test_a_network_selects_the_address_for_other_hosts() -> None:
    assert HOST.address_in(None) == "10.0.0.2"
    assert HOST.address_in("ib0") == "10.1.4.2"
    assert HOST.address_in("10.1.0.0/16") == "10.1.4.2"


def test_a_host_outside_the_network_has_no_address_in_it() -> None:
    assert HOST.address_in("10.2.0.0/16") == ""
    assert HOST.address_in("ib1") == ""
    assert HOST.address_in("x") == ""
