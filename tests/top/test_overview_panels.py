"""Overview: free rows show the graph, the devices, and curves of the deployment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mstar_core.observe.filter import Filter
from mstar_core.observe.frames import DeploymentStatus
from mstarctl.top.data.view import View
from mstarctl.top.layout.overview_panels import deployment_curves, throughput
from mstarctl.top.layout.pages import compose
from mstarctl.top.layout.state import State
from tests.top.pictures import view_of


def few(name: str, count: int) -> View:
    """Return the end of a recording with `count` of its requests."""
    view = view_of(name)
    kept = sorted(view.store.requests.values(), key=lambda r: r.handle)[:count]
    return replace(view, filter=Filter.parse(" OR ".join(f"id:{r.id}" for r in kept) if kept else "id:none"))


def text(view: View, width: int, height: int) -> str:
    rows = compose(view, State(), width, height).lines
    assert (len(rows), {row.width for row in rows}) == (height, {width})
    return "\n".join(row.plain for row in rows)


def test_free_rows_show_the_graph_with_its_devices_and_curves() -> None:
    drawn = text(few("orpheus", 2), 140, 40)
    assert "Graph   rank 0 on cpu" in drawn and "[text]" in drawn and "[audio]" in drawn
    assert all(title in drawn for title in ("audio  ", "TTFT  ", "rank 0 busy  "))
    assert "-29s" in drawn or "now" in drawn


def test_each_rank_names_its_gpu() -> None:
    drawn = text(few("qwen3_omni", 1), 160, 50)
    assert "rank 0 on gpu0 NVIDIA H100 80GB HBM3   rank 1 on gpu1 NVIDIA H100 80GB HBM3" in drawn
    assert "Thinker" in drawn and "rank 0 busy" in drawn


@pytest.mark.parametrize("size", [(140, 40), (120, 34), (100, 30)])
def test_requests_come_before_panels(size: tuple[int, int]) -> None:
    """A full table leaves no rows, so that no request is hidden by a picture."""
    view = view_of("qwen3_omni")
    drawn = text(view, *size)
    shown = sum(row.startswith(" r-") for row in drawn.splitlines())
    assert shown == len(view.store.requests) or "Graph   " not in drawn


@pytest.mark.parametrize("size", [(80, 24), (40, 12), (99, 60)])
def test_narrow_screens_have_no_panels(size: tuple[int, int]) -> None:
    assert "Graph   " not in text(few("orpheus", 1), *size)


def test_the_throughput_is_of_what_the_model_makes() -> None:
    view = view_of("orpheus")
    assert throughput(view)[:2] == ("audio", "x") and throughput(view_of("qwen3_omni"))[:2] == ("text", "tok/s")
    curves = deployment_curves(view)
    assert curves[0].now == view.store.deployment.audio_x and any(value for value in curves[0].values)
    assert isinstance(view.store.deployment, DeploymentStatus) and len(curves) == 3
