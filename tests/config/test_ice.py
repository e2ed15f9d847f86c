"""URLs of STUN and TURN servers (RFC 7064, RFC 7065)."""

from __future__ import annotations

import pytest

from mstar_core.config.ice import ice_scheme
from mstar_core.config.resolved import IceServer
from tests.config.conftest import Resolve

GOOD = "model: toy\nnode_groups:\n  - node_names: [LLM, vocoder]\n    ranks: [0]\n"


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        ("stun:stun.example.org", "stun"),
        ("stun:192.0.2.1:3478", "stun"),
        ("stuns:stun.example.org:5349", "stuns"),
        ("turn:turn.example.org?transport=udp", "turn"),
        ("turn:turn.example.org:3478?transport=tcp", "turn"),
        ("turns:turn.example.org:443?transport=tcp", "turns"),
        ("turns:turn.example.org", "turns"),
        ("stun:stun.example.org?transport=udp", None),
        ("turns:turn.example.org?transport=udp", None),
        ("turn:turn.example.org?transport=sctp", None),
        ("turn://turn.example.org", None),
        ("turn:", None),
        ("turn:host:0", None),
        ("turn:host:65536", None),
        ("turn:user@host", None),
        ("stun:[2001:db8::1]:3478", None),
        ("STUN:host", None),
        ("stun:host\n", None),
        ("host:3478", None),
    ],
)
def test_a_url_names_a_scheme_a_host_and_a_port(url: str, scheme: str | None) -> None:
    assert ice_scheme(url) == scheme


def test_servers_of_a_file_keep_their_order_and_may_be_set_by_a_flag(resolved: Resolve) -> None:
    first, second = "urls: ['stun:a', 'turn:a']\n    secret_file: f", "urls: ['stun:b']"
    text = f"{GOOD}api:\n  realtime_ice_servers:\n  - {first}\n  - {second}\n"
    both = IceServer(urls=("stun:a", "turn:a"), secret_file="f")
    assert resolved(text).api.realtime_ice_servers == (both, IceServer(urls=("stun:b",)))
    assert resolved(text, "api.realtime_ice_servers.1.urls=['stun:c']").api.realtime_ice_servers[1].urls == ("stun:c",)
    assert resolved(GOOD, "api.realtime_ice_servers=[{urls: ['stun:d']}]").api.realtime_ice_servers[0].urls == (
        "stun:d",
    )
    assert resolved(text, "api.realtime_ice_servers=null").api.realtime_ice_servers == ()
