"""Files of API keys: what they may contain, and what a reload takes from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstar_core.config.resolved import ApiConfig, IceServer
from mstar_core.errors import ConfigError
from mstar_core.host.api_keys import read_keys, with_keys
from mstarctl.start.options import UpOptions
from mstarctl.start.plan import make_planned
from tests.fakes.ports import free_port


def test_a_reload_replaces_the_keys_of_the_files(tmp_path: Path) -> None:
    keys, metrics = tmp_path / "keys", tmp_path / "metrics"
    keys.write_text("# comment\none\n\n two \n")
    metrics.write_text("m\n")
    first = with_keys(ApiConfig(api_keys=("typed",), api_key_file=str(keys), metrics_key_file=str(metrics)))
    assert (first.api_keys, first.keys_in_file, first.metrics_keys) == (("typed", "one", "two"), 2, ("m",))
    keys.write_text("three\n")
    again = with_keys(first)
    assert (again.api_keys, again.keys_in_file) == (("typed", "three"), 1)
    assert again.secrets == ("typed", "three", "m")
    assert with_keys(ApiConfig(api_keys=("typed",))).api_keys == ("typed",)


@pytest.mark.parametrize("text", ["", "\n# only a comment\n", None])
def test_a_file_without_a_key_is_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match="--api-key-file"):
        read_keys(file, "--api-key-file")


def test_a_relative_path_holds_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSTAR_RUNTIME_DIR", str(tmp_path / "r"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "s"))
    (tmp_path / "keys").write_text("one\n")
    monkeypatch.chdir(tmp_path)
    options = UpOptions(target="orpheus:mini", device="cpu", port=free_port(), sets=["api.api_key_file=keys"])
    api = make_planned(options).spec.api
    monkeypatch.chdir("/")
    assert with_keys(api).api_keys == api.api_keys == ("one",)


def test_secrets_of_turn_servers_come_from_their_files_and_a_reload_reads_them_again(tmp_path: Path) -> None:
    password, secret = tmp_path / "password", tmp_path / "secret"
    password.write_text("#pw \n")
    secret.write_text("north")
    servers = (
        IceServer(urls=("stun:a",)),
        IceServer(urls=("turn:a",), username="ann", credential_file=str(password)),
        IceServer(urls=("turn:b",), secret_file=str(secret)),
    )
    first = with_keys(ApiConfig(realtime_ice_servers=servers))
    assert first.ice_secrets == ("", "#pw", "north")
    assert first.secrets == ("#pw", "north")
    secret.write_text("south\n")
    assert with_keys(first).ice_secrets == ("", "#pw", "south")


@pytest.mark.parametrize("text", ["", "\n", "one\ntwo\n", None])
def test_a_file_of_a_turn_server_has_one_line(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "secret"
    if text is not None:
        file.write_text(text)
    server = IceServer(urls=("turn:b",), secret_file=str(file))
    with pytest.raises(ConfigError, match="secret_file") as caught:
        with_keys(ApiConfig(realtime_ice_servers=(server,)))
    assert caught.value.facts["key"] == "api.realtime_ice_servers.0.secret_file"
