"""The screen "models" of a gateway: states, reasons and memory bars."""

from __future__ import annotations

import pytest

from mstarctl.client.store import Store
from mstarctl.top.data.gateway import GatewayView, view_of
from mstarctl.top.data.view import View
from mstarctl.top.drawing.glyphs import ASCII, UNICODE, Glyphs, in_ascii
from mstarctl.top.gateway_app import GatewayApp
from mstarctl.top.layout.gateway.models import models_screen
from mstarctl.top.layout.gateway.tenants import tenants_screen
from tests.top.pictures import check, text_of

GIB = 1 << 30
HEAD = {
    "name": "gateway",
    "endpoint": "http://127.0.0.1:8080",
    "state": "ready",
    "running": 3,
    "waiting": 2,
    "age_s": 3725.0,
}


def model(name: str, state: str, **facts: object) -> dict[str, object]:
    known = {"replicas": [], "running": 0, "queued": 0, "wakes": 0, "held": {}, "totals": {}, "reason": ""}
    return {"name": name, "state": state, **known, **facts}


@pytest.fixture
def gateway() -> GatewayView:
    """A gateway whose models show each state on two GPUs."""
    totals = {"cuda:0": 140 * GIB}
    two = {"cuda:0": 140 * GIB, "cuda:1": 140 * GIB}
    replica = {"deployment": "x", "url": "http://x"}
    models = [
        model("bagel", "sleeping", held={"cuda:0": 2 * GIB}, totals=totals, wakes=4),
        model("broken", "failed", reason="no weights; the folder is empty"),
        model("omni", "ready", replicas=[replica], held={"cuda:0": 88 * GIB}, totals=totals, running=3, wakes=7),
        model("orpheus", "loading", queued=2, totals=totals, reason="waits for memory that omni holds"),
        model("owl", "loading", queued=1, progress={"state": "loading", "text": "wake", "share": 0.406}),
        model("pi05", "idle", replicas=[replica] * 2, held={"cuda:0": 16 * GIB, "cuda:1": 16 * GIB}, totals=two),
        model("whisper", "absent"),
    ]
    tenants = [
        {"name": "acme", "running": 3, "concurrency": 8, "requests_minute": 41, "requests_per_minute": 600}
        | {"tokens": 4_612_000, "tokens_per_day": 5_000_000, "refused": 7},
        {"name": "anonymous", "tokens": 812, "audio_s": 12.5},
        {"name": "lab", "running": 1, "requests_minute": 2, "audio_s": 1800.0, "audio_seconds_per_day": 3600.0},
    ]
    return view_of({"deployment": HEAD, "models": models, "tenants": tenants})


@pytest.mark.parametrize(("name", "glyphs"), [("models", UNICODE), ("models-ascii", ASCII)])
def test_the_screen_of_a_gateway(gateway: GatewayView, name: str, glyphs: Glyphs) -> None:
    rows = models_screen(gateway, View(store=Store(), glyphs=glyphs), 120, 24)
    check(name, text_of([in_ascii(row) for row in rows] if glyphs.is_ascii else rows))


@pytest.mark.parametrize("size", [(140, 40), (80, 24), (40, 8)])
def test_the_screen_fills_its_cells(gateway: GatewayView, size: tuple[int, int]) -> None:
    width, height = size
    rows = models_screen(gateway, View(store=Store()), width, height)
    assert (len(rows), {row.width for row in rows}) == (height, {width})


@pytest.mark.parametrize("size", [(140, 40), (80, 24), (40, 4)])
def test_the_screen_of_tenants_fills_its_cells(gateway: GatewayView, size: tuple[int, int]) -> None:
    width, height = size
    rows = tenants_screen(gateway, width, height)
    assert (len(rows), {row.width for row in rows}) == (height, {width})


def test_a_nearly_used_quota_is_a_warning_and_a_gateway_without_tenants_says_how_to_add_one(
    gateway: GatewayView,
) -> None:
    rows = tenants_screen(gateway, 120, 10)
    acme = next(row for row in rows if "acme" in row.plain)
    assert [span.text.strip() for span in acme.spans if span.role == "warn"] == ["4.6M/5.0M", "7"]
    empty = view_of({"deployment": HEAD, "models": []})
    assert "mstarctl tenants add" in "\n".join(row.plain for row in tenants_screen(empty, 100, 10))


def test_a_gateway_without_models_says_how_to_add_one() -> None:
    empty = view_of({"deployment": HEAD, "models": []})
    text = "\n".join(row.plain for row in models_screen(empty, View(store=Store()), 100, 10))
    assert "mstarctl serve add" in text and "0 models" in text


async def test_the_app_follows_its_gateway_and_ends(gateway: GatewayView) -> None:
    empty = view_of({"deployment": HEAD, "models": []})
    app = GatewayApp(lambda: gateway, empty, mode="true", glyphs=UNICODE)
    async with app.run_test(size=(100, 20)) as pilot:
        await pilot.pause()
        app.read_again()
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert app.shown is gateway
        await pilot.press("t")
        assert app.shows_tenants and "acme" in "\n".join(row.plain for row in app.rows(100, 20))
        assert "whisper" not in "\n".join(row.plain for row in app.rows(100, 20))
        await pilot.press("t")
        assert not app.shows_tenants
        await pilot.press("q")


def test_hosts_are_shown_for_a_model_that_runs_on_another_one() -> None:
    here = [{"deployment": "a", "host": "local", "state": "ready"}]
    there = [*here, {"deployment": "gpu7/b", "host": "gpu7", "state": "lost"}]
    models = [model("a", "ready", places=here), model("b", "ready", places=there)]
    rows = models_screen(view_of({"deployment": HEAD, "models": models}), View(store=Store()), 100, 20)
    assert [row.plain.strip() for row in rows if " on " in row.plain] == ["on local, gpu7 lost"]
