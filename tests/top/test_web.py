"""`top --web`: the command that it serves, the requests that it answers, and the error without its extra."""

from __future__ import annotations

import shlex
import sys

import pytest

from mstar_core.errors import UsageError
from mstarctl.top.keys import KEYS, works
from mstarctl.top.web import child_command, is_allowed, policy, serve_top, without_foreign


@pytest.mark.parametrize("given", [["--web", "9000"], ["--web=9000"]])
def test_the_served_command_is_the_given_one_read_only(given: list[str]) -> None:
    words = shlex.split(child_command(["--socket", "/a b/x", "top", "orpheus", *given, "--view", "nodes"]))
    assert words == [
        sys.executable,
        "-m",
        "mstarctl",
        "--socket",
        "/a b/x",
        "top",
        "orpheus",
        "--view",
        "nodes",
        "--readonly",
    ]


def test_only_pages_of_the_server_itself_may_connect() -> None:
    for host in ("127.0.0.1:9000", "localhost:9000"):
        assert is_allowed(host, None, 9000)
        assert is_allowed(host, "http://127.0.0.1:9000", 9000)
        assert not is_allowed(host, "https://evil.example", 9000)
        assert not is_allowed(host, "null", 9000)
    assert not is_allowed("evil.example:9000", None, 9000)
    assert not is_allowed("127.0.0.1:9001", None, 9000)


def test_links_to_other_origins_are_removed() -> None:
    page = '<link rel="stylesheet" href="http://127.0.0.1/own.css" /><link\n href="https://fonts.example/x"\n/><p>'
    assert without_foreign(page) == page[: page.index("<link\n")] + "<p>"


def test_without_the_extra_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textual_serve.server", None)
    with pytest.raises(UsageError) as caught:
        serve_top(["top", "--web", "9000"], 9000)
    assert "mstarctl[web]" in str(caught.value.hint)


def test_the_policy_names_the_pages_own_scripts() -> None:
    page = '<head><script>start()</script></head><button onClick="again()">'
    actual = policy(page, 9000)
    assert actual.startswith("default-src 'none'; script-src 'self' 'unsafe-hashes' 'sha256-")
    assert actual.count("'sha256-") == 2
    assert policy(page.replace("again", "other"), 9000) != actual


@pytest.mark.parametrize("name", ["export", "record", "perfetto"])
def test_readonly_disables_keys_that_write_files(name: str) -> None:
    key = next(key for key in KEYS if key.action == name)
    page = min(key.pages)
    assert works(key, page, may_write=False, may_save=True, is_live=True)
    assert not works(key, page, may_write=True, may_save=False, is_live=True)
