"""The table of `ps`: figures that a deployment has, and endpoints as a client needs them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from mstar_core.config.resolved import ApiConfig
from mstarctl.client import Known
from mstarctl.commands.ps import _show, changes, item_of
from mstarctl.output import Printer
from mstarctl.output.options import GlobalOptions

SPOKEN = {"ttft_p50_ms": 210.0, "ttfa_p50_ms": 380.0, "latency_p50_ms": 900.0, "tokens_s": 80.0, "audio_x": 9.0}
ROBOT = {"ttft_p50_ms": 62.0, "ttfa_p50_ms": None, "latency_p50_ms": 63.0, "tokens_s": 0.0, "requests_s": 9.6}


def shown(capsys: pytest.CaptureFixture[str], output: str, **head: Any) -> str:
    """Return what `ps` prints of one running deployment."""
    deployment = {"name": "a", "state": "ready", "endpoint": "https://127.0.0.1:8000", **head}
    item = item_of(Known(name="a", state="ready", snapshot={"deployment": deployment}))
    _show([item], Printer(GlobalOptions(output=output)))
    return capsys.readouterr().out


def test_a_robot_has_its_latency_and_rate(capsys: pytest.CaptureFixture[str]) -> None:
    table = shown(capsys, "table", **ROBOT)
    assert "LATENCY p50" in table and "63 ms" in table and "9.6" in table
    spoken = shown(capsys, "table", **SPOKEN)
    assert "LATENCY p50" not in spoken and "210 ms" in spoken
    assert "LATENCY p50" in shown(capsys, "wide", **SPOKEN)
    assert json.loads(shown(capsys, "json", **SPOKEN))["items"][0]["latency_p50_ms"] == 900.0


def test_the_number_of_hosts_is_shown_if_there_are_several(capsys: pytest.CaptureFixture[str]) -> None:
    several = shown(capsys, "table", hosts=2, ranks=4).splitlines()
    assert (
        several[0].split()[:4] == ["NAME", "STATE", "RANKS", "HOSTS"]
        and several[1].split()[:4] == "a ready 4 2".split()
    )
    assert "HOSTS" not in shown(capsys, "table", hosts=0) and "HOSTS" in shown(capsys, "wide")


def test_an_endpoint_with_a_certificate_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert "https://127.0.0.1:8000" in shown(capsys, "table")
    assert "http" not in shown(capsys, "table", endpoint="http://127.0.0.1:8000")


@pytest.mark.parametrize(
    ("api", "url"),
    [
        (ApiConfig(), "http://127.0.0.1:8000"),
        (ApiConfig(host="0.0.0.0", tls_cert="c.pem"), "https://127.0.0.1:8000"),
        (ApiConfig(host="::1", port=1), "http://[::1]:1"),
    ],
)
def test_the_url_is_one_that_a_client_of_this_host_can_use(api: ApiConfig, url: str) -> None:
    assert api.url == url


def looked(state: str, *failures: dict[str, Any], is_over: bool = True) -> dict[str, Any]:
    """Return what a watch finds of a deployment with these failures, of which it may suffer from the last."""
    cause = None if is_over else failures[-1]
    head = {"name": "a", "state": state, "reason": "why", "failures": list(failures), "cause": cause}
    return item_of(Known(name="a", state=state, snapshot={"deployment": head}))


def test_a_watch_names_deaths_that_are_over_before_it_looks_again() -> None:
    first, second = ({"message": f"worker-{rank} was killed", "time": time.time() - 3 + rank} for rank in range(2))
    ready = looked("ready", first)
    [line] = changes([ready], [looked("ready", first, second)])
    assert line["note"].startswith("worker-1 was killed, ") and line["cause"] is None, "the first is already known"
    [line] = changes([looked("ready")], [looked("ready", first, second)])
    assert "worker-0 was killed" in line["note"] and "worker-1 was killed" in line["note"]
    [line] = changes([looked("ready")], [looked("degraded", first, second, is_over=False)])
    assert line["note"].startswith("why; worker-0 was killed") and "worker-1" not in line["note"], "one is the reason"
    assert changes([ready], [looked("ready", first)]) == []
    assert changes([], [ready])[0]["note"] == "", "what the first look found is not new"
