"""Facts of a host: its address in a network between hosts, and the reserved name."""

from __future__ import annotations

import msgspec

from mstar_core.cluster.facts import NAME_FAULT, HostFacts

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


def test_another_host_with_the_reserved_name_cannot_be_used() -> None:
    reserved = msgspec.structs.replace(HOST, name="local")
    assert (HOST.fault, reserved.fault) == ("", NAME_FAULT)
    assert msgspec.json.decode(msgspec.json.encode(reserved), type=HostFacts).fault == NAME_FAULT
    assert msgspec.structs.replace(reserved, is_local=True, fault="").fault == "", (
        "the host of the supervisor may have it"
    )
