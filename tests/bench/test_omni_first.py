"""The first requests of a deployment: what a watch of its captures reports, and bodies that carry an image."""

from __future__ import annotations

import base64
import json
from typing import cast

from bench.families.omni_first import CaptureWatch
from bench.gpu_qwen3omni import CHAT, workloads
from bench.serving.deployment import Served


class Told:
    """A deployment whose telemetry is a list of readings; the last one stays."""

    def __init__(self, *readings: dict[str, float]) -> None:
        self._readings = list(readings)

    def values(self) -> dict[str, float]:
        return self._readings.pop(0) if len(self._readings) > 1 else self._readings[0]


def reading(left: float, captured: float, misses: float) -> dict[str, float]:
    node = "worker-0.Thinker"
    return {
        f"{node}.graphs_planned": left,
        f"{node}.graphs_captured": captured,
        f"{node}.graph_misses": misses,
        "worker-0.Talker.graphs_planned": 0.0,
    }


def test_a_watch_reports_its_last_miss_and_when_nothing_was_left() -> None:
    watch = CaptureWatch(cast(Served, Told(reading(2, 5, 0), reading(2, 5, 3), reading(1, 6, 3), reading(0, 7, 3))))
    for _ in range(5):
        watch.read()
    for at, row in enumerate(watch.rows):
        watch.rows[at] = (float(at), *row[1:])
    found = watch.facts()
    assert found["last_miss_s"] == 1.0 and found["nothing_left_s"] == 3.0
    assert [row[1:] for row in found["rows"]] == [(2, 5, 0), (2, 5, 3), (1, 6, 3), (0, 7, 3)]
    assert found["misses"] == {"Thinker.graph_misses": 3} and found["left_at_end"] == {}


def test_a_watch_of_a_running_deployment_counts_its_misses_alone() -> None:
    with CaptureWatch(cast(Served, Told(reading(1, 5, 4), reading(1, 5, 4), reading(1, 5, 6)))) as watch:
        pass
    found = watch.facts()
    assert found["misses"] == {"Thinker.graph_misses": 2}
    assert found["nothing_left_s"] is None and found["left_at_end"] == {"Thinker": 1}


def test_both_ways_of_an_image_carry_the_same_bytes() -> None:
    chosen = workloads(is_tiny=True)
    (image,) = chosen["picture_form_to_text"].files.values()
    head, body = chosen["picture_form_to_text"].encoded(8000, 3)
    assert b"multipart/form-data" in head and image in body
    head, body = chosen["picture_url_to_text"].encoded(8000, 3)
    assert head.startswith(f"POST {CHAT} ".encode())
    (part, text) = json.loads(body)["messages"][0]["content"]
    assert base64.b64decode(part["image_url"]["url"].partition(",")[2]) == image
    assert text["text"] == chosen["picture_form_to_text"].body(3)["text"]
