"""Resolution of deployment files: values, their sources, placement, names on the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mstar_core.config.files.load import default_config, read_text
from mstar_core.config.files.placement import make_plan
from mstar_core.config.files.resolution import resolve
from mstar_core.config.key import ITEM
from mstar_core.config.schema import SETTINGS, values_of
from mstar_core.errors import ConfigError, NotFound
from mstar_core.plugin import ModelSpec
from mstarctl.authoring.config_file import commented_file, differences
from mstarctl.authoring.config_schema import explain, json_schema
from mstarctl.plugins import Plugins
from mstarctl.start.target import find, resolve_target
from tests.config.conftest import Resolve
from tests.config.test_resolution_refusals import GOOD, TWO

ROOT = Path(__file__).resolve().parents[2]


def test_every_value_knows_its_source(resolved: Resolve) -> None:
    config = resolved(GOOD + "api:\n  port: 9000\n", "kv_cache.pages=12")
    assert (config.max_seq_len, config.source("max_seq_len")) == (512, "toy.yaml:2")
    assert (config.api.port, config.source("api.port")) == (9000, "toy.yaml:7")
    assert (config.kv_cache.pages, config.source("kv_cache.pages")) == (12, "--set kv_cache.pages=12")
    assert (config.max_queue, config.source("max_queue")) == (128, "default")
    assert (config.name, config.source("name")) == ("toy", "model toy")
    assert config.source("node_groups.0.ranks") == "toy.yaml:5"


def test_an_override_wins_over_the_file_and_the_last_one_wins(resolved: Resolve) -> None:
    assert resolved(GOOD, "max_seq_len=64", "max_seq_len=32").max_seq_len == 32
    assert resolved(GOOD, "node_groups.0.ranks=[0, 1]").node_groups[0].ranks == (0, 1)


def test_walk_aliases_become_their_walks(resolved: Resolve) -> None:
    assert resolved(TWO.replace("[prefill, guided]", "[first, guided]")).node_groups[0].graph_walks == (
        "prefill",
        "guided",
    )


def test_a_node_on_a_branch_follows_its_parent_unless_it_is_placed(spec: ModelSpec, resolved: Resolve) -> None:
    assert make_plan(spec, resolved(GOOD), ("cpu",)).replicas("LLM_cfg", "guided") == ()
    placed = make_plan(spec, resolved(GOOD + "  - {node_names: [LLM_cfg], ranks: [1]}\n"), ("cpu",))
    assert placed.replicas("LLM_cfg", "guided") == ((1,),)
    assert [rank.nodes for rank in placed.ranks] == [("LLM", "vocoder"), ("LLM_cfg",)]


def test_groups_scoped_to_walks_give_replicas_by_walk(spec: ModelSpec, resolved: Resolve) -> None:
    plan = make_plan(spec, resolved(TWO), ("cuda:3", "cuda:5"))
    assert plan.replicas("LLM", "prefill") == ((0,), (1,))
    assert plan.replicas("LLM", "decode") == ((1,),)
    assert [rank.device for rank in plan.ranks] == ["cuda:3", "cuda:5"]


def test_more_ranks_than_tp_size_are_replicas(spec: ModelSpec, resolved: Resolve) -> None:
    text = "model: toy\nnode_groups:\n  - {node_names: [LLM], ranks: [0, 1, 2, 3], tp_size: 2}\n"
    text += "  - {node_names: [vocoder], ranks: [0]}\n"
    assert make_plan(spec, resolved(text), ("cpu",)).replicas("LLM", "decode") == ((0, 1), (2, 3))


def test_on_the_cpu_a_rank_is_a_process(spec: ModelSpec, resolved: Resolve) -> None:
    assert [rank.device for rank in make_plan(spec, resolved(TWO), ("cpu",)).ranks] == ["cpu", "cpu"]


def test_a_plugin_may_plan_itself(spec: ModelSpec, plugins: Plugins, resolved: Resolve) -> None:
    planned = make_plan(spec, resolved(GOOD), ("cpu",))

    class Planner:
        from mstar_core.plugin import hookimpl

        @hookimpl
        def mstar_plan(self, model: ModelSpec, request: Any) -> Any:
            return planned if request.devices == ("cuda:0",) else None

    plugins.manager.register(Planner())
    assert plugins.plan(spec, resolved(TWO), ("cuda:0",)) == planned
    assert plugins.plan(spec, resolved(TWO), ("cpu",)) != planned


def test_a_name_means_a_model_a_shipped_file_or_a_path(plugins: Plugins, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD.replace("512", "99"))
    assert [resolve_target(find(text, plugins)).max_seq_len for text in ("toy", "toi", "toy_one", str(file))] == [
        512,
        512,
        512,
        99,
    ]


def test_an_unknown_name_names_the_nearest(plugins: Plugins) -> None:
    with pytest.raises(NotFound, match="did you mean 'toy_one'"):
        find("toy_onne", plugins)
    with pytest.raises(NotFound, match="did you mean 'tiny'"):
        find("toy:tyny", plugins)
    with pytest.raises(ConfigError, match="cannot be read"):
        find("no/such.yaml", plugins)


def test_the_commented_file_is_valid_and_its_comments_are_the_defaults(spec: ModelSpec, resolved: Resolve) -> None:
    text = commented_file(spec)
    bare = resolved(text)
    written = resolved(re.sub(r"^# (?=(?:  )?\w+:)", "", text, flags=re.MULTILINE))
    assert differences(bare, written) == []
    assert set(written.provenance.values()) >= {"toy.yaml:3"}


def test_differences_name_values_and_sources(spec: ModelSpec, resolved: Resolve) -> None:
    (difference,) = differences(resolved(GOOD), resolved(GOOD, "max_queue=5"))
    assert difference == {
        "name": "max_queue",
        "left": 128,
        "right": 5,
        "left_source": "default",
        "right_source": "--set max_queue=5",
    }


def test_every_key_changes_the_result(spec: ModelSpec, resolved: Resolve) -> None:
    """Every accepted key has an effect."""
    other: dict[str, Any] = {
        "name": "mine",
        "weights": "/weights",
        "dtype": "float32",
        "attention": "torch",
        "model_kwargs": {"layers": 3},
        "image_share": 0.25,
        "warm": "full",
        "kv_cache.pages": 7,
        "kv_cache.tokens": 7,
        "kv_cache.memory_fraction": 0.5,
        "kv_cache.share": {"LLM": 0.5},
        "quantization": "fp8",
        "memory_budget": "20GiB",
        "api.host": "0.0.0.0",
        "api.max_body_bytes": 4096,
        "api.responses_max_bytes": 65536,
        "api.videos_max_bytes": 65536,
        "logs.max_bytes": 65536,
        "api.unknown_params": "warn",
        "api.api_key_file": "keys",
        "api.metrics_key_file": "metrics-keys",
        "api.tls_cert": "cert.pem",
        "api.tls_key": "key.pem",
        "api.aliases": ["other"],
        "api.cors_origins": ["https://example.org"],
        "api.remote_media": ["example.org"],
        "api.realtime_ice_servers": [{"urls": ["stun:example.org"]}],
        "transport.protocol": "TCP",
        "transport.device": "eth0",
        "lora.adapters": {"pirate": "/adapters/pirate"},
        "ray.address": "auto",
        "ray.devices": ["gpu-a:0", "gpu-a:0"],
        "ray.network": "eth0",
        "ray.ports": "20000-20999",
    }
    base = resolved(GOOD)
    skipped = ("model", "node_groups", "kv_cache", "lora", "transport", "ray", "logs", "api")
    for item in SETTINGS:
        if item.key in skipped or item.key.startswith("node_groups") or ITEM in item.key:
            continue
        value = other.get(item.key, not item.default if item.kind == "boolean" else 17)
        changed = resolved(GOOD, f"{item.key}={yaml.safe_dump(value, default_flow_style=True).split(chr(10))[0]}")
        assert differences(base, changed), item.key


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 10**6),
    st.floats(),
    st.text(max_size=6),
    st.lists(st.integers(-1, 4), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_mutation_is_accepted_with_its_meaning_or_refused_with_its_place(
    data: st.DataObject, spec: ModelSpec
) -> None:
    tree = yaml.safe_load(
        TWO + "kv_cache: {pages: 4, prefix_cache: false}\napi: {port: 80}\nmodel_kwargs: {layers: 2}\n"
    )
    place: Any = tree
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    action = data.draw(st.sampled_from(["value", "delete", "rename"]))
    if action == "value" or isinstance(place, list) and action == "rename":
        place[key] = data.draw(VALUES)
    elif action == "delete":
        del place[key]
    else:
        place[data.draw(st.text(min_size=1, max_size=5))] = place.pop(key)
    text = yaml.safe_dump(tree)
    try:
        config = resolve(spec, read_text(text, "toy.yaml"))
    except ConfigError as error:
        assert error.facts["file"] == "toy.yaml"
        assert isinstance(error.facts["line"], int) and 1 <= error.facts["line"] <= len(text.splitlines()) + 1
        assert "key" in error.facts
        return
    kept = {key: value for key, value in values_of(config).items() if config.source(key).startswith("toy.yaml")}
    written = _flat(yaml.safe_load(text))
    assert {key: value for key, value in written.items() if value is not None} == {
        key: kept[key] for key in written if key in kept and written[key] is not None
    }


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict) and tree:
        return {
            k: v
            for key, item in tree.items()
            for k, v in _flat(item, f"{prefix}.{key}" if prefix else str(key)).items()
        }
    if isinstance(tree, list) and tree and isinstance(tree[0], dict):
        return {k: v for index, item in enumerate(tree) for k, v in _flat(item, f"{prefix}.{index}").items()}
    return {} if isinstance(tree, dict) else {prefix: tree}


def test_every_setting_is_explained() -> None:
    for item in SETTINGS:
        assert item.doc.endswith(".")
        assert explain(item.key) is item
    assert explain("node_groups.0.ranks").key == "node_groups[].ranks"
    with pytest.raises(NotFound, match="did you mean"):
        explain("kv_cache.pagse")


def test_the_schema_holds_every_key() -> None:
    def keys(schema: dict[str, Any], prefix: str) -> set[str]:
        names: set[str] = set()
        for word, part in schema.get("properties", {}).items():
            key = f"{prefix}.{word}" if prefix else word
            names |= {key} | keys(part, key) | keys(part.get("items", {}), f"{key}[]")
        return names

    assert keys(json_schema(), "") == {item.key for item in SETTINGS}


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.yaml")), ids=lambda path: path.stem)
def test_every_file_of_the_repository_validates_and_plans(path: Path) -> None:
    installed = Plugins.discover(environment={})
    target = find(str(path), installed)
    plan = installed.plan(target.spec, resolve_target(target), ("cpu",))
    assert {node for rank in plan.ranks for node in rank.nodes} <= {node.name for node in target.spec.nodes}


def test_every_model_ships_its_default_file() -> None:
    for model in Plugins.discover(environment={}).models():
        assert default_config(model).model == model.name


def test_a_resolved_configuration_holds_every_setting(resolved: Resolve) -> None:
    server = "api.realtime_ice_servers=[{urls: ['turn:a'], username: u, credential_file: f}]"
    shown = {re.sub(r"\.\d+", "[]", key) for key in values_of(resolved(GOOD, server))}
    plain = {item.key for item in SETTINGS if item.kind not in ("section", "list of section", "mapping")}
    assert plain <= shown
