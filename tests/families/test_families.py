"""Every family: sound graphs, programs that end, documented parameters, correct state of this version."""

from __future__ import annotations

from typing import Any

import pytest

from mstar_core.errors import RequestError
from mstar_core.graph import GraphEdge, graph_nodes, loops
from mstar_core.graph.compile.wiring import compile_graph
from mstar_core.plugin import ModelSpec, param_schema, param_specs, parse_params
from mstar_core.plugin.check.dry_run import dry_run
from mstar_core.plugin.check.spec_check import check_spec
from mstar_core.plugin.params import ParamSpec
from tests.families.families import SAMPLES, SPECS, sample_of

PARAMS = [(name, item) for name, spec in SPECS.items() for item in param_specs(spec.params)]
BOUNDED = [(name, item) for name, item in PARAMS if any(v is not None for v in (item.ge, item.gt, item.le, item.lt))]


def test_the_models_that_operators_know_are_there() -> None:
    names = {"bagel", "llm", "orpheus", "pi05", "qwen3_omni", "qwen3_tts", "qwen3_tts_base", "vjepa2", "vjepa2_ac"}
    names |= {"wan22", "wan22_a14b", "wan22_i2v_a14b", "whisper"}
    assert set(SPECS) == names


@pytest.mark.parametrize("model", SPECS)
def test_a_spec_contradicts_itself_nowhere(model: str) -> None:
    assert [str(error) for error in check_spec(SPECS[model])] == []


@pytest.mark.parametrize(("model", "sample"), SAMPLES)
def test_programs_end_on_every_sample(model: str, sample: str) -> None:
    assert any(dry_run(SPECS[model], sample_of(model, sample)).values())


@pytest.mark.parametrize("model", SPECS)
def test_every_walk_is_taken_by_some_sample(model: str) -> None:
    spec = SPECS[model]
    taken = {walk for sample in spec.samples for walks in dry_run(spec, sample).values() for walk in walks}
    assert taken == {walk for partition in spec.partitions for walk in partition.walks}


@pytest.mark.parametrize("model", SPECS)
def test_walks_compile_to_the_form_that_workers_run(model: str) -> None:
    spec = SPECS[model]
    walks = {name: walk for partition in spec.partitions for name, walk in partition.walks.items()}
    assert set(compile_graph(walks, spec.streams)) == set(walks)


@pytest.mark.parametrize("model", SPECS)
def test_both_ends_of_every_edge_are_of_one_type(model: str) -> None:
    for partition in SPECS[model].partitions:
        for walk in partition.walks.values():
            for use in graph_nodes(walk):
                assert_types_match(use.spec, use.outputs)
            for loop in loops(walk):
                nodes = {node.spec.name: node.spec for node in graph_nodes(loop)}
                for out, port in loop.carry.items():
                    makers = [node for node in nodes.values() if out in node.ports]
                    takers = [node for node in nodes.values() if port in node.ports]
                    assert any(t.port(port).accepts(m.port(out)) for m in makers for t in takers), (loop.name, out)


def assert_types_match(node: Any, edges: Any) -> None:
    for edge in edges:
        if isinstance(edge, GraphEdge) and not edge.is_client:
            assert edge.to.port(edge.target_port).accepts(node.port(edge.port)), (node.name, edge)


@pytest.mark.parametrize(("model", "item"), PARAMS, ids=lambda value: getattr(value, "name", value))
def test_parameters_are_documented_and_their_defaults_pass(model: str, item: ParamSpec) -> None:
    assert item.doc
    assert not item.doc.endswith(".")
    if item.default is not None:
        made = parse_params(SPECS[model].params, {item.name: item.default})
        assert getattr(made.params, item.name) == item.default


@pytest.mark.parametrize(("model", "item"), BOUNDED, ids=lambda value: getattr(value, "name", value))
def test_values_just_outside_a_range_are_refused(model: str, item: ParamSpec) -> None:
    step = 1 if "integer" in item.kind else 1e-6
    outside = [item.ge - step if item.ge is not None else item.gt, item.le + step if item.le is not None else item.lt]
    for value in [number for number in outside if number is not None]:
        given = [value, value] if item.kind.startswith("list of ") else value
        with pytest.raises(RequestError) as error:
            parse_params(SPECS[model].params, {item.name: given})
        assert error.value.field == item.name


@pytest.mark.parametrize("model", SPECS)
def test_the_schema_of_parameters_is_json_schema(model: str) -> None:
    def kinds(schema: dict[str, Any]) -> set[str]:
        found = schema.get("type", [])
        inner = kinds(schema["items"]) if "items" in schema else set()
        return inner | set([found] if isinstance(found, str) else found)

    properties = param_schema(SPECS[model].params)["properties"]
    known = {"array", "boolean", "integer", "null", "number", "object", "string"}
    assert set().union(*(kinds(schema) for schema in properties.values())) <= known


@pytest.mark.parametrize("model", SPECS)
def test_a_model_has_all_of_its_code_or_says_that_it_has_none(model: str) -> None:
    spec = SPECS[model]
    assert len({part is None for part in (spec.processor, spec.model, spec.tiny)}) == 1


@pytest.mark.parametrize("model", SPECS)
def test_binding_without_a_checkpoint_changes_no_names(model: str) -> None:
    spec = SPECS[model]
    bound: ModelSpec = spec.bound(None, spec.model_kwargs)
    assert [node.name for node in bound.nodes] == [node.name for node in spec.nodes]
    assert check_spec(bound) == []
