"""Keys and addresses in the headers of forwarded requests."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from mstar_core.gateway.door.headers import answer_headers, is_loopback, key_of, request_headers, request_id_of
from mstar_core.gateway.parts import Replica

REPLICA = Replica(model="llm", deployment="llm", url="http://llm", key="deployment-key")


def sent(
    headers: dict[str, str], *, takes_keys: bool, peer: str = "127.0.0.1", tenant: str = "acme"
) -> CIMultiDict[str]:
    """Return the headers that the deployment gets."""
    return request_headers(CIMultiDict(headers), REPLICA, "req-1", peer, takes_keys=takes_keys, tenant=tenant)


def test_the_key_of_a_tenant_stays_at_the_gateway() -> None:
    passed = sent({"Authorization": "Bearer tenant", "X-Api-Key": "tenant"}, takes_keys=True)
    assert passed["Authorization"] == "Bearer deployment-key" and "X-Api-Key" not in passed


def test_tenants_share_no_cache_whatever_scope_they_ask_for() -> None:
    asked = {"X-Mstar-Cache-Scope": "other", "x-mstar-cache-scope": "another"}
    mine, same, other = (sent(asked, takes_keys=True, tenant=name) for name in ("acme", "acme", "globex"))
    assert mine.getall("X-Mstar-Cache-Scope") == same.getall("X-Mstar-Cache-Scope") != ["other"]
    assert mine["X-Mstar-Cache-Scope"] != other["X-Mstar-Cache-Scope"] and "acme" not in mine["X-Mstar-Cache-Scope"]
    assert sent(asked, takes_keys=False)["X-Mstar-Cache-Scope"] == "other", "without tenants it is the client's"


def test_without_tenants_the_key_goes_to_the_deployment() -> None:
    assert sent({"Authorization": "Bearer mine"}, takes_keys=False)["Authorization"] == "Bearer mine"
    assert "Authorization" not in sent({}, takes_keys=False)


def test_a_client_secret_passes_as_it_is() -> None:
    assert sent({"Authorization": "Bearer ek_1"}, takes_keys=True)["Authorization"] == "Bearer ek_1"


def test_a_deployment_learns_of_clients_of_other_hosts() -> None:
    """It shows its live view to its own host, which a gateway on the same host must not turn every client into."""
    assert "X-Forwarded-For" not in sent({}, takes_keys=False)
    assert sent({}, takes_keys=False, peer="10.0.0.5")["X-Forwarded-For"] == "10.0.0.5"
    forged = sent({"X-Forwarded-For": "127.0.0.1"}, takes_keys=False, peer="10.0.0.5")
    assert forged["X-Forwarded-For"] == "127.0.0.1, 10.0.0.5"


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"Authorization": "Bearer a"}, "a"),
        ({"Authorization": "api-key b"}, "b"),
        ({"X-Api-Key": "c"}, "c"),
        ({"Sec-WebSocket-Protocol": "realtime, openai-insecure-api-key.ek_1"}, "ek_1"),
        ({"Authorization": "Basic x"}, None),
        ({}, None),
    ],
)
def test_a_key_is_found(headers: dict[str, str], key: str | None) -> None:
    assert key_of(CIMultiDict(headers)) == key


@pytest.mark.parametrize(("given", "is_kept"), [("mine-1", True), ("a b", False), ("x" * 129, False), ("a/b", False)])
def test_only_a_valid_request_id_is_kept(given: str, is_kept: bool) -> None:
    used = request_id_of(CIMultiDict({"X-Request-ID": given}))
    assert (used == given) is is_kept and (is_kept or used.startswith("req-"))


def test_a_wrong_request_id_is_refused_by_the_deployment_and_not_replaced() -> None:
    assert sent({"X-Request-ID": ""}, takes_keys=False)["X-Request-ID"] == ""
    assert sent({}, takes_keys=False)["X-Request-ID"] == "req-1"


def test_headers_that_an_answer_names_for_one_hop_are_removed() -> None:
    passed = answer_headers(
        [("Connection", "x-hop"), ("X-Hop", "1"), ("Set-Cookie", "a"), ("Set-Cookie", "b")], "x-hop"
    )
    assert list(passed.items()) == [("Set-Cookie", "a"), ("Set-Cookie", "b"), ("Server", "mstar")]


def test_loopback_addresses() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "::1%lo")))
    assert not any(map(is_loopback, ("10.0.0.1", "", "host", "::ffff:10.0.0.1")))
