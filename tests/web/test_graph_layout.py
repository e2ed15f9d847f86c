"""Places of the page's graph: every rank, group and alias has its frame, and every arrow a target."""

from __future__ import annotations

import json
from typing import Any

from tests.web.conftest import RunModule

CFG = {
    "graph": {
        "nodes": [
            {"name": "LLM", "replicas": [[0]]},
            {"name": "LLM_cfg_text", "replicas": [[0], [1]]},
            {"name": "LLM_cfg_img", "replicas": [[0], [2]]},
            {"name": "combine_cfg", "replicas": [[0]]},
        ],
        "edges": [
            {"name": "tokens", "into": "LLM", "modality": "text"},
            {"name": "velocity", "source": "LLM", "into": "combine_cfg"},
            {"name": "velocity", "source": "LLM_cfg_text", "into": "combine_cfg"},
            {"name": "velocity", "source": "LLM_cfg_img", "into": "combine_cfg"},
            {"name": "progress", "source": "combine_cfg", "modality": "progress"},
        ],
    },
    "ranks": {str(rank): {"rank": rank, "state": "ready"} for rank in range(3)},
    "nodes": {"LLM@0": {}, "combine_cfg@0": {}, "LLM_cfg_text@1": {}, "LLM_cfg_img@2": {}},
    "edges": {
        "latents@0>1": {"name": "latents", "source": "LLM", "into_rank": 1, "items_s": 9},
        "velocity@1>0": {"name": "velocity", "source": "LLM_cfg_text", "source_rank": 1, "items_s": 3},
    },
}
"""Guidance on ranks of its own: the fields that the supervisor sends, which omits zeros and empty texts."""


def placed(run_module: RunModule, state: dict[str, Any]) -> dict[str, Any]:
    """Return frames as title -> nodes, wires as (from, to, rate)."""
    found: dict[str, Any] = run_module(
        "const { layout } = await import(`${STATIC}/telemetry/layout.js`);"
        f"const state = {json.dumps(state)};"
        "const { frames, boxes, wires } = layout(state.graph, state);"
        "const at = (box) => `${box.name}@${box.ranks.join('+')}`;"
        "return { frames: Object.fromEntries(frames.map((frame) => [frame.title + (frame.isDown ? ' down' : ''),"
        " boxes.filter((box) => box.ranks.join() === frame.ranks.join()).map((box) => box.name)])),"
        " wires: wires.map((wire) => [at(wire.from), at(wire.to), wire.itemsPerSecond]) };"
    )
    return found


def test_an_alias_stands_in_the_rank_that_runs_it(run_module: RunModule) -> None:
    found = placed(run_module, CFG)
    assert found["frames"] == {"rank 0": ["LLM", "combine_cfg"], "rank 1": ["LLM_cfg_text"], "rank 2": ["LLM_cfg_img"]}


def test_each_edge_has_a_target_and_its_rate(run_module: RunModule) -> None:
    wires = placed(run_module, CFG)["wires"]
    assert ["LLM@0", "LLM_cfg_text@1", 9] in wires  # the supervisor names no node at the end of this edge
    assert ["LLM_cfg_text@1", "combine_cfg@0", 3] in wires
    assert ["LLM_cfg_img@2", "combine_cfg@0", 0] in wires


def test_an_alias_without_steps_of_its_own_is_drawn_with_its_node(run_module: RunModule) -> None:
    state = {**CFG, "nodes": {}, "ranks": {"0": {"rank": 0}}, "edges": {}}
    state["graph"] = {"nodes": [{"name": name, "replicas": [[0]]} for name in ("LLM", "alias")], "edges": []}
    assert placed(run_module, state)["frames"] == {"rank 0": ["LLM", "alias"]}


def test_a_tensor_parallel_group_is_one_frame(run_module: RunModule) -> None:
    graph = {
        "nodes": [{"name": "Thinker", "replicas": [[0, 1]]}, {"name": "Talker", "replicas": [[1]]}],
        "edges": [{"name": "text_ids", "source": "Thinker", "into": "Talker", "is_stream": True}],
    }
    state = {"graph": graph, "nodes": {"Thinker@0": {}, "Talker@1": {}}, "ranks": {"0": {}, "1": {"rank": 1}}}
    found = placed(run_module, state)
    assert found["frames"] == {"rank 0+1": ["Thinker"], "rank 1": ["Talker"]}
    assert found["wires"] == [["Thinker@0+1", "Talker@1", 0]]


def test_replicas_are_drawn_one_by_one_and_feed_their_own_rank(run_module: RunModule) -> None:
    graph = {
        "nodes": [{"name": "LLM", "replicas": [[0], [1]]}, {"name": "snac", "replicas": [[0], [1]]}],
        "edges": [{"name": "audio_ids", "source": "LLM", "into": "snac", "is_stream": True}],
    }
    state = {"graph": graph, "nodes": {"LLM@0": {}, "LLM@1": {}, "snac@0": {}, "snac@1": {}}}
    found = placed(run_module, state)
    assert found["frames"] == {"rank 0": ["LLM", "snac"], "rank 1": ["LLM", "snac"]}
    assert found["wires"] == [["LLM@0", "snac@0", 0], ["LLM@1", "snac@1", 0]]


def test_a_rank_that_ended_is_marked_and_moves_nothing(run_module: RunModule) -> None:
    ranks = {**CFG["ranks"], "1": {"rank": 1, "state": "ended"}}
    found = placed(run_module, {**CFG, "ranks": ranks})
    assert "rank 1 down" in found["frames"]
    assert ["LLM_cfg_text@1", "combine_cfg@0", 0] in found["wires"]


def test_rows_of_the_account_follow_the_graph_and_take_the_sums_of_the_trace(run_module: RunModule) -> None:
    span = {"process": "worker-0", "rank": 0, "walk": "w"}
    trace = {
        "spans": [
            {**span, "node": "snac", "kind": "wait", "start_ms": 0, "end_ms": 50},
            {**span, "node": "LLM", "kind": "compute", "start_ms": 10, "end_ms": 90},
            {**span, "node": "snac", "kind": "compute", "start_ms": 50, "end_ms": 95},
            {**span, "process": "api", "rank": None, "node": "prepare", "kind": "compute", "start_ms": 0, "end_ms": 9},
        ],
        "sums": [
            {**span, "node": "LLM", "kind": "compute", "busy_ms": 31.5},
            {**span, "node": "snac", "kind": "compute", "busy_ms": 4},
            {**span, "node": "snac", "kind": "wait", "busy_ms": 50},
        ],
    }
    graph = {"nodes": [{"name": "LLM"}, {"name": "snac"}], "edges": [{"source": "LLM", "into": "snac", "name": "ids"}]}
    found = run_module(
        "const { rowsOf } = await import(`${STATIC}/telemetry/rows.js`);"
        f"return rowsOf({json.dumps(trace['spans'])}, {json.dumps(trace['sums'])}, {json.dumps(graph)})"
        ".map((row) => [row.name, row.computeMs]);"
    )
    assert found == [["api prepare", 0], ["LLM", 31.5], ["snac", 4]]


def test_times_of_client_and_server_are_told_apart(run_module: RunModule) -> None:
    found = run_module(
        "const { gaps } = await import(`${STATIC}/telemetry/rows.js`);"
        "return gaps({ ttft: 408, total: 900 }, { ttft_ms: 262, total_ms: null });"
    )
    assert found == [
        {"name": "First output", "client": 408, "server": 262, "gap": 146},
        {"name": "Total", "client": 900, "server": None, "gap": None},
    ]
