"""CURVE keys: a private file, whole or not at all, and clear errors for any other."""

from __future__ import annotations

import json
import stat

import pytest

from mstar_core.errors import TransportError
from mstar_core.transport.curve import make_keys, read_keys, write_keys
from mstar_core.transport.remote import RemoteAccess


def test_keys_come_back_from_a_private_file(directory):
    keys = make_keys()
    write_keys(directory / "curve.json", keys)
    assert read_keys(directory / "curve.json") == keys
    assert stat.S_IMODE((directory / "curve.json").stat().st_mode) == 0o600
    assert [path.name for path in directory.iterdir()] == ["curve.json"]


def test_no_text_shows_the_secret():
    keys = make_keys()
    assert keys.secret not in f"{keys} {keys!r} {RemoteAccess('10.0.0.1', keys)}"


def test_each_pair_is_another():
    assert len({key for _ in range(5) for key in make_keys()}) == 10


def test_a_file_that_others_can_read_is_refused(directory):
    write_keys(directory / "curve.json", make_keys())
    (directory / "curve.json").chmod(0o644)
    with pytest.raises(TransportError, match="open to others.*0644"):
        read_keys(directory / "curve.json")


def test_a_missing_file_is_named(directory):
    with pytest.raises(TransportError, match=r"curve\.json: No such file"):
        read_keys(directory / "curve.json")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"public": 1, "secret": 2}', "{secret}", '"\\ud800"'])
def test_a_file_without_a_pair_is_refused_and_not_quoted(directory, text):
    path = directory / "curve.json"
    write_keys(path, make_keys())
    path.write_text(text)
    with pytest.raises(TransportError, match="holds no CURVE key pair"):
        read_keys(path)


def test_halves_of_two_pairs_are_refused(directory):
    path = directory / "curve.json"
    write_keys(path, make_keys())
    path.write_text(json.dumps({"public": make_keys().public, "secret": make_keys().secret}))
    with pytest.raises(TransportError, match="holds no CURVE key pair"):
        read_keys(path)
