"""The list of a host's deployments, from which `top` is started without a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstar_core.host.gpu_locks import FOLDER_VARIABLE, MemoryClaim, acquire_gpus, release
from mstar_core.host.hardware.gpus import Gpu
from mstarctl.client.store import Store
from mstarctl.objects.host import host_lines, read_host
from mstarctl.top.data.host import HostDeployment, HostView
from mstarctl.top.data.view import View
from mstarctl.top.drawing.glyphs import UNICODE
from mstarctl.top.host_app import HostApp
from mstarctl.top.layout.hosts.screen import host_screen

GIB = 1 << 30
FACTS = {"running": 3, "waiting": 1, "ttft_p50_ms": 231.4, "tokens_s": 412.0, "age_s": 95.0, "model": "orpheus"}
MEMINFO = "MemTotal:       32768 kB\nMemFree:        1024 kB\nMemAvailable:   16384 kB\n"


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> HostView:
    """A host with two deployments and three GPUs: one held, one used by others, one free."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    held = acquire_gpus({"cuda:0": "GPU-a"}, "speech")
    meminfo = tmp_path / "meminfo"  # type: ignore[operator]  # a path
    meminfo.write_text(MEMINFO)
    gpus = [
        Gpu(name="NVIDIA H200", driver="580", free=20 * GIB, total=140 * GIB, uuid="GPU-a"),
        Gpu(name="NVIDIA H200", driver="580", free=100 * GIB, total=140 * GIB, uuid="GPU-b"),
        Gpu(name="NVIDIA H200", driver="580", free=140 * GIB, total=140 * GIB, uuid="GPU-c"),
    ]
    try:
        host = read_host(gpus, meminfo)
    finally:
        release(held)
    deployments = (
        HostDeployment(name="robot", state="draining", facts={"requests_s": 5.0}),
        HostDeployment(name="speech", state="ready", facts=FACTS),
    )
    return HostView(deployments=deployments, host=host)


def test_ps_names_the_holder_of_each_gpu_and_free_memory(found: HostView) -> None:
    assert found.host is not None
    first, head, *rows = host_lines(found.host)
    assert "memory 16.0 MiB free of 32.0 MiB, 3 GPUs" in first
    assert head.split() == ["GPU", "PRODUCT", "FREE", "TOTAL", "HELD", "BY"]
    assert "speech (pid " in rows[0] and "20.0 GiB" in rows[0]
    assert "other processes, 40.0 GiB" in rows[1] and rows[2].endswith("free")


def test_ps_names_the_shares_of_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    claims = {"GPU-a": MemoryClaim(device="cuda:0", need_bytes=20 * GIB, total_bytes=140 * GIB)}
    held = [acquire_gpus({"cuda:0": "GPU-a"}, name, claims) for name in ("omni", "speech")]
    host = read_host([Gpu(name="NVIDIA H200", driver="580", free=90 * GIB, total=140 * GIB, uuid="GPU-a")])
    assert list(host_lines(host))[2].endswith("omni 20.0 GiB, speech 20.0 GiB")
    for each in held:
        release(each)


@pytest.mark.parametrize("size", [(140, 40), (120, 34), (80, 24), (40, 12)])
def test_the_screen_of_a_host_fills_its_cells(found: HostView, size: tuple[int, int]) -> None:
    width, height = size
    rows = host_screen(found, View(store=Store()), 1, width, height)
    assert (len(rows), {row.width for row in rows}) == (height, {width})
    text = "\n".join(row.plain for row in rows)
    assert "robot" in text and "◐ draining" in text and "● ready" in text
    if width >= 80:
        assert "3/1" in text and "231 ms" in text and "412 tok/s" in text and "5.0/s" in text and "HELD" not in text
    if width >= 120:
        assert "speech (pid " in text and "other processes" in text


@pytest.mark.parametrize(("keys", "name"), [("2", "speech"), ("down enter", "speech"), ("enter", "robot"), ("q", None)])
async def test_a_key_chooses_a_deployment(found: HostView, keys: str, name: str | None) -> None:
    app = HostApp(lambda: found, found, mode="true", glyphs=UNICODE)
    async with app.run_test(size=(100, 20)) as pilot:
        await pilot.pause()
        await pilot.press(*keys.split())
        await pilot.pause()
    assert app.return_value == name


async def test_the_choice_stays_with_its_deployment(found: HostView) -> None:
    app = HostApp(lambda: found, found, mode="mono", glyphs=UNICODE)
    async with app.run_test(size=(100, 20)) as pilot:
        await pilot.press("down")
        new = HostDeployment(name="a-new-one", state="starting", facts={})
        app._show(HostView(deployments=(new, *found.deployments), host=found.host), "")
        assert app.shown.deployments[app.chosen].name == "speech"
        app._show(HostView(deployments=()), "the host does not answer")
        assert app.chosen == 0
