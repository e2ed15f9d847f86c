"""All families can be said, checked, compiled, drawn and exported."""

from __future__ import annotations

import json

import pytest

from mstar_core.graph import (
    EndWalk,
    Fire,
    WalkState,
    check_graph,
    compile_graph,
    walk_inputs,
)
from mstar_core.graph.compile.cut import cut
from mstarctl.graphs.dot import graph_to_dot
from mstarctl.graphs.drawing import draw_graph
from mstarctl.graphs.published import graph_to_dict
from tests.graph.families import FAMILIES, Family, bagel, orpheus, qwen3_omni


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]()


def test_a_family_has_no_problem(family: Family) -> None:
    graph = family.graph
    assert check_graph(graph.nodes, graph.streams, graph.partitions, family.params) == []


def test_a_family_compiles_into_walks_that_start(family: Family) -> None:
    for walk in compile_graph(family.walks, family.graph.streams).values():
        share = cut(walk, {node.name: 0 for node in family.graph.nodes})[0]
        limits = {loop.name: 2 for loop in walk.loops}
        inputs = {entry.source.port for task in walk.tasks for entry in task.inputs}
        assert WalkState(share, limits, inputs).start()


@pytest.mark.parametrize("width", [40, 57, 80, 100, 140])
def test_a_drawing_keeps_its_width_and_shows_every_node_stream_and_loop(family: Family, width: int) -> None:
    text = draw_graph(family.graph, width)
    assert max(map(len, text.splitlines())) <= width
    for walk in compile_graph(family.walks, family.graph.streams).values():
        for name in [walk.name, *(task.name for task in walk.tasks), *(f"↻ {loop.name}" for loop in walk.loops)]:
            assert name in text
    for stream in family.graph.streams:
        assert f"≋ {stream.name}" in text
        assert type(stream.chunk).__name__ in text


def test_an_ascii_drawing_has_the_same_shape(family: Family) -> None:
    fancy, plain = draw_graph(family.graph, 90), draw_graph(family.graph, 90, ascii_only=True)
    assert plain.isascii()
    assert [len(line) for line in plain.splitlines()] == [len(line) for line in fancy.splitlines()]


def test_the_json_form_is_json_and_names_everything(family: Family) -> None:
    form = json.loads(json.dumps(graph_to_dict(family.graph)))
    assert [node["name"] for node in form["nodes"]] == [node.name for node in family.graph.nodes]
    walks = [name for partition in form["partitions"] for name in partition["walks"]]
    assert walks == list(family.walks)


def test_dot_text_is_balanced_and_names_every_node(family: Family) -> None:
    text = graph_to_dot(family.graph)
    assert text.startswith("digraph") and text.count("{") == text.count("}")
    assert all(f'"{node.name}"' in text for node in family.graph.nodes)


def test_the_orpheus_drawing_reads_well() -> None:
    assert draw_graph(orpheus().graph, 78) == ORPHEUS


def test_walk_inputs_tell_what_a_run_gives() -> None:
    walks = orpheus().walks
    assert {name: str(port) for name, port in walk_inputs(walks["prefill"]).items()} == {"tokens": "i64[n]"}
    assert {name: str(port) for name, port in walk_inputs(walks["decode"]).items()} == {"token": "i64[1]?"}
    omni = qwen3_omni()
    assert walk_inputs(omni.walks["talker_prefill"], omni.graph.streams) == {}


@pytest.mark.parametrize(
    ("branches", "nodes"),
    [(("main",), {"LLM"}), (("main", "cfg_text", "cfg_img"), {"LLM", "LLM_cfg_text", "LLM_cfg_img"})],
)
def test_absent_branches_of_bagel_are_skipped_and_combine_runs_without_them(
    branches: tuple[str, ...], nodes: set[str]
) -> None:
    family = bagel()
    walk = compile_graph(family.walks)["image_gen"]
    state = WalkState(cut(walk, {node.name: 0 for node in family.graph.nodes})[0], 1, {"latents"}, branches)
    fired = [action for action in state.start() if isinstance(action, Fire)]
    assert {walk.tasks[fire.task].name for fire in fired} == nodes
    following = [action for fire in fired for action in state.done(fire.task, fire.iteration, {"velocity"})]
    combine = next(action for action in following if isinstance(action, Fire))
    taken = {"LLM": "v", "LLM_cfg_text": "v_text", "LLM_cfg_img": "v_img"}
    assert set(combine.inputs) == {"latents", "$step", *(taken[name] for name in nodes)}


def test_a_prefill_covers_every_branch_that_has_no_node_of_its_own() -> None:
    walk = compile_graph(bagel().walks)["prefill_text"]
    state = WalkState(cut(walk, {"LLM": 0})[0], None, {"tokens"}, ("main", "cfg_img"))
    (fire,) = state.start()
    assert isinstance(fire, Fire)
    assert fire.branches == ("main", "cfg_img")
    assert state.done(0, (), set()) == [EndWalk("done", {})]


def test_branches_fold_into_their_parents_rank_unless_they_are_placed() -> None:
    walk = compile_graph(bagel().walks)["image_gen"]
    home: dict[int | str, int] = {"LLM": 1, "combine_cfg": 0, "vae_decoder": 0}
    assert len(cut(walk, home)[1].tasks) == 3
    assert len(cut(walk, {**home, "LLM_cfg_img": 2})[2].tasks) == 1


ORPHEUS = """\
orpheus

╔ LLM ═══════════════════════════════════════════════════════════════════════╗
║ prefill                                                                    ║
║   tokens ──▶ LLM ──▶ ≋audio_ids                                            ║
║   LLM.token → ≋audio_ids                                                   ║
║                                                                            ║
║ decode                                                                     ║
║   token? ──▶ ↻ LLM ──▶ ≋audio_ids                                          ║
║   ↻ decode_loop: carries token; stops on token 128258 unless ignore_eos    ║
║   LLM.token → ≋audio_ids                                                   ║
╚════════════════════════════════════════════════════════════════════════════╝
   ▼ ≋ audio_ids → snac_decoder.window   SlidingWindow(window=28, stride=7,
   │   tail=drop) accepts 128266 to 156937
╔ SNAC ══════════════════════════════════════════════════════════════════════╗
║ snac_chunk                                                                 ║
║   ≋audio_ids ──▶ ↻ snac_decoder ──▶ [audio]                                ║
║   ↻ windows: once per chunk of ≋audio_ids                                  ║
║   snac_decoder.pcm → [audio]                                               ║
╚════════════════════════════════════════════════════════════════════════════╝

↻ loop   ≋ stream to another partition   [x] output of the request   name? may
be absent
"""
