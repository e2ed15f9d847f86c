"""Options of `up` that set configuration keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstar_core.config.schema import SETTINGS
from mstar_core.errors import UsageError
from mstarctl.complete import set_words
from mstarctl.start.options import UpOptions, key_options, overrides


def test_every_option_of_a_key_names_a_key_and_its_flag() -> None:
    keys = {item.key for item in SETTINGS}
    options = {flag: sets.key for _, sets, flag in key_options()}
    assert set(options.values()) <= keys and all(flag.startswith("--") for flag in options)
    assert options["--port"] == "api.port" and options["--mooncake-port"] == "transport.port"


def test_an_option_overrides_a_set_of_the_same_key() -> None:
    options = UpOptions(sets=["api.port=1", "max_queue=3"], port=2, no_console=True, remote_media=["a", "b", "a"])
    assert [(item.key, item.value, item.source) for item in overrides(options)] == [
        ("api.port", 1, "--set api.port=1"),
        ("max_queue", 3, "--set max_queue=3"),
        ("api.port", 2, "--port"),
        ("api.console", False, "--no-console"),
        ("api.remote_media", ["a", "b"], "--allow-remote-media"),
    ]


def test_options_that_were_not_given_set_nothing() -> None:
    assert overrides(UpOptions(target="orpheus")) == []


def test_paths_are_absolute_and_times_are_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = UpOptions(tls_key=Path("key.pem"), timeout="2m", protocol="tcp")
    values = {item.key: item.value for item in overrides(options)}
    assert values == {"api.tls_key": str(tmp_path / "key.pem"), "api.timeout_s": 120.0, "transport.protocol": "TCP"}
    with pytest.raises(UsageError, match="unknown tensor protocol"):
        overrides(UpOptions(protocol="UDP"))


def test_keys_and_their_few_values_are_completed() -> None:
    assert "max_queue=" in set_words("max_") and "kv_cache=" not in set_words("")
    assert set_words("api.console=") == ["api.console=false", "api.console=true"]
    assert set_words("transport.protocol=R") == ["transport.protocol=RDMA"]
