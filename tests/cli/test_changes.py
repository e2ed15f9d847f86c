"""Lines about the models of a gateway whose state or progress has changed."""

from __future__ import annotations

from typing import Any

from mstarctl.serve.changes import ModelChanges, places_text, progress_text


def model(state: str, **facts: Any) -> dict[str, Any]:
    return {"name": "omni", "state": state, "reason": "", **facts}


def loading(share: float | None, text: str = "wake") -> dict[str, Any]:
    return model("loading", progress={"state": "loading", "text": text, "share": share})


def test_a_line_is_printed_for_each_change_and_each_tenth_of_a_wake() -> None:
    changes = ModelChanges()
    told = [
        list(changes.lines([item]))
        for item in (
            model("absent"),
            loading(None, "rank 0: weights"),
            loading(0.02),
            loading(0.04),
            loading(0.5),
            model("idle"),
            model("ready"),
            model("sleeping"),
            model("failed", reason="no weights\n  the folder is empty"),
        )
    ]
    assert told == [
        [],
        ["omni: loading rank 0: weights"],
        ["omni: loading 2 % wake"],
        [],
        ["omni: loading 50 % wake"],
        ["omni: ready"],
        [],
        ["omni: sleeping"],
        ["omni: failed no weights the folder is empty"],
    ]
    assert progress_text(model("idle")) == "" and progress_text(loading(0.999)) == "99 % wake"


def test_hosts_of_deployments_are_counted_and_lost_ones_are_marked() -> None:
    places = [
        {"deployment": "omni", "host": "local", "state": "ready"},
        {"deployment": "gpu7/omni", "host": "gpu7", "state": "idle"},
        {"deployment": "gpu7/omni-2", "host": "gpu7", "state": "ready"},
        {"deployment": "gpu8/omni", "host": "gpu8", "state": "lost"},
    ]
    assert places_text(places) == "local, 2 gpu7, gpu8 lost"
    assert places_text([]) == ""
