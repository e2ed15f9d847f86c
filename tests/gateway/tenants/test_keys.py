"""Keys and rights of tenants: what is stored, what a key opens, and what a tenant may not learn."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path

import pytest

from mstar_core.errors import NotFound, StateConflict
from mstar_core.gateway.tenants.accounts.directory import Directory, InvalidKey
from mstar_core.gateway.tenants.accounts.tenant_file import TenantFile
from mstar_core.gateway.tenants.accounts.terms import ANONYMOUS, Terms

MODELS = ("bagel", "orpheus", "qwen3_omni")
DAY_S = 86_400.0


class Clock:
    """A clock that tests set."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def directory(folder: Path, clock: Clock | None = None, declared: Sequence[Terms] = ()) -> Directory:
    return Directory(TenantFile(folder), declared, clock=clock or Clock())


def test_without_tenants_every_request_is_anonymous(tmp_path: Path) -> None:
    found = directory(tmp_path)
    assert not found.has_tenants
    for key in (None, "sk-any"):
        caller = found.caller(key)
        assert caller.terms.name == ANONYMOUS and found.visible(caller, MODELS) == list(MODELS)


def test_a_key_opens_its_tenant_and_no_other(tmp_path: Path) -> None:
    file = TenantFile(tmp_path)
    file.add(Terms(name="acme", models=("orpheus",)))
    file.add(Terms(name="lab"))
    keys = {name: file.new_key(name, 0.0) for name in ("acme", "lab")}
    found = directory(tmp_path)
    assert {name: found.caller(key).terms.name for name, key in keys.items()} == {"acme": "acme", "lab": "lab"}
    assert found.visible(found.caller(keys["acme"]), MODELS) == ["orpheus"]
    assert found.visible(found.caller(keys["lab"]), MODELS) == list(MODELS)
    for wrong in (None, "", keys["acme"][:-1], keys["acme"] + "x", "\udcff"):
        with pytest.raises(InvalidKey) as refused:
            found.caller(wrong)
        assert refused.value.status == 401


def test_the_file_is_private_and_holds_no_key(tmp_path: Path) -> None:
    file = TenantFile(tmp_path / "state")
    file.add(Terms(name="acme"))
    key = file.new_key("acme", 0.0)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert key not in file.path.read_text() and key.removeprefix("mstar-") not in file.path.read_text()


def test_a_change_is_seen_without_a_restart(tmp_path: Path) -> None:
    file, found = TenantFile(tmp_path), directory(tmp_path)
    found.caller(None)
    file.add(Terms(name="acme"))
    key = file.new_key("acme", 0.0)
    assert found.caller(key).terms.name == "acme"
    file.revoke(found.caller(key).key, 0.0)
    with pytest.raises(InvalidKey):
        found.caller(key)


def test_a_rotated_key_ends_after_its_grace(tmp_path: Path) -> None:
    clock, file = Clock(0.0), TenantFile(tmp_path)
    file.add(Terms(name="acme"))
    old = file.new_key("acme", 0.0)
    new = file.new_key("acme", 0.0, valid_s=DAY_S)
    found = directory(tmp_path, clock)
    clock.now = DAY_S - 1
    assert found.caller(old).terms.name == found.caller(new).terms.name == "acme"
    clock.now = DAY_S
    with pytest.raises(InvalidKey):
        found.caller(old)
    assert found.caller(new).terms.name == "acme"


def test_terms_of_the_serve_file_win_and_its_tenants_take_stored_keys(tmp_path: Path) -> None:
    file = TenantFile(tmp_path)
    file.add(Terms(name="acme", requests_per_minute=1))
    key = file.new_key("acme", 0.0)
    other = file.new_key("lab", 0.0, is_known=True)
    found = directory(tmp_path, declared=[Terms(name="acme", requests_per_minute=9), Terms(name="lab")])
    assert found.caller(key).terms.requests_per_minute == 9
    assert found.caller(other).terms.name == "lab"
    assert directory(tmp_path).tenants.keys() == {"acme"}


def test_requests_without_a_key_have_terms_of_their_own_where_keys_are_optional(tmp_path: Path) -> None:
    file = TenantFile(tmp_path)
    file.add(Terms(name=ANONYMOUS, requests_per_minute=3))
    file.add(Terms(name="acme"))
    found = Directory(file, needs_key=False)
    assert found.caller(None).terms.requests_per_minute == 3
    with pytest.raises(InvalidKey):
        Directory(file).caller(None)


def test_a_model_of_chosen_tenants_is_hidden_from_others(tmp_path: Path) -> None:
    found = Directory(TenantFile(tmp_path), [Terms(name="acme"), Terms(name="lab")], {"bagel": ("lab",)})
    file = TenantFile(tmp_path)
    keys = {name: file.new_key(name, 0.0, is_known=True) for name in ("acme", "lab")}
    assert "bagel" in found.visible(found.caller(keys["lab"]), MODELS)
    assert "bagel" not in found.visible(found.caller(keys["acme"]), MODELS)


def test_faults_of_tenants_name_the_way_out(tmp_path: Path) -> None:
    file = TenantFile(tmp_path)
    with pytest.raises(NotFound, match="mstarctl tenants add acme"):
        file.new_key("acme", 0.0)
    file.add(Terms(name="acme"))
    with pytest.raises(StateConflict, match="mstarctl tenants set acme"):
        file.add(Terms(name="acme"))
    with pytest.raises(NotFound, match="did you mean 'acme'"):
        file.new_key("acne", 0.0)
    with pytest.raises(NotFound):
        file.revoke("", 0.0)
