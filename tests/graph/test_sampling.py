"""The table of sampling parameters: what each entry declares, and that all users of the table agree with it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from mstar_core.api.openapi import COMMON
from mstar_core.api.parse.params import NO_EFFECT, ParamRules, check_params
from mstar_core.engine.sampling.columns import columns, fields
from mstar_core.errors import RequestError
from mstar_core.graph.declare.nodes import Sampling
from mstar_core.graph.declare.sampling import (
    ADJUSTING,
    COLUMNS,
    MOST_BIASED,
    NAMES,
    OFFERED,
    SamplingParams,
    TextSampling,
)
from mstar_core.plugin.params import COMMON_NAMES, param_specs, parse_params
from mstar_core.worker.state.request import sampling_params
from tests.families.families import SPECS

ENTRIES = {item.name: item for item in dataclasses.fields(TextSampling)}
SET = SamplingParams(
    temperature=0.5,
    top_p=0.8,
    top_k=7,
    min_p=0.1,
    repetition_penalty=1.2,
    presence_penalty=-0.5,
    frequency_penalty=1.5,
    logit_bias={5: -100.0, 151000: 2.5},
    seed=2**63 - 1,
)
SPEAKERS = {"qwen3_omni": "Thinker", "bagel": "LLM", "orpheus": "LLM"}
"""Models that sample text or audio ids, and their sampling node."""


def test_each_user_of_the_table_has_all_its_parameters() -> None:
    assert set(OFFERED) <= set(COMMON_NAMES) and set(OFFERED) <= set(COMMON)
    assert set(ADJUSTING) <= set(NO_EFFECT), "a model without them refuses what has an effect"
    page = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()
    assert all(f"| `{name}` |" in page for name in OFFERED)


@pytest.mark.parametrize("name", NAMES)
def test_a_value_that_is_off_fills_its_columns_as_padding_does(name: str) -> None:
    """Padding of a captured step is switched off by the same numbers."""
    arrays = columns([SamplingParams()], 2, adjusting=True)
    for column in ENTRIES[name].metadata[COLUMNS]:
        np.testing.assert_array_equal(arrays[column][0], arrays[column][1])
        assert str(arrays[column].tobytes())  # of the declared dtype
        assert arrays[column].dtype == ENTRIES[name].metadata[COLUMNS][column].dtype


def test_columns_hold_the_parameters_and_fit_their_fields() -> None:
    arrays = columns([SET, SamplingParams()], 3, adjusting=True)
    assert {name: arrays[name].size for name in arrays} == {
        n: size for n, (_, size) in fields(3, adjusting=True).items()
    }
    assert arrays["greedy"].tolist() == [False, True, True] and arrays["top_p"].tolist() == [0.8, 2.0, 2.0]
    assert arrays["presence"].tolist() == [-0.5, 0, 0] and arrays["frequency"].tolist() == [1.5, 0, 0]
    assert arrays["bias_ids"].shape == (3, MOST_BIASED) and arrays["bias_ids"][0, :3].tolist() == [5, 151000, 0]
    assert arrays["biases"][0, :3].tolist() == [-100, 2.5, 0] and np.signbit(arrays["biases"][1:]).all()


def test_a_default_step_carries_no_column_that_adjusts() -> None:
    assert set(fields(1)) == set(columns([SET], 1)) == {"temperature", "greedy", "top_p", "top_k", "min_p", "penalty"}


def test_the_wire_form_keeps_every_parameter() -> None:
    data = msgspec.msgpack.encode({3: SET})
    assert msgspec.msgpack.decode(data, type=dict[int, SamplingParams]) == {3: SET}


@pytest.mark.parametrize("model", SPEAKERS)
def test_every_model_that_samples_has_all_parameters(model: str) -> None:
    spec = SPECS[model]
    assert set(OFFERED) <= {item.name for item in param_specs(spec.params)}
    node = spec.node(SPEAKERS[model])
    assert node.sampling is not None and node.sampling.vocab > 0
    sent: dict[str, Any] = {**dataclasses.asdict(SET), "seed": 1}
    params = parse_params(spec.params, sent).params
    values = {item.name: getattr(params, item.name) for item in param_specs(spec.params)}
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(values))
    assert sampling_params(node.sampling, arrived, SET.seed) == SET


def test_parameters_of_a_node_are_read_under_its_prefix() -> None:
    values = {"talker_top_k": 5, "top_k": 9, "talker_temperature": 1, "talker_min_p": None}
    expected = SamplingParams(temperature=1.0, top_k=5, seed=4)
    assert sampling_params(Sampling(port="code0", prefix="talker_"), values, 4) == expected
    assert sampling_params(None, values, 4) == SamplingParams(seed=4)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Text(TextSampling):
    """A model without other parameters."""


@pytest.mark.parametrize("value", [{"5": -100, "7": 2.5}, {5: -100, 7: "2.5"}, '{"5": -100, "7": 2.5}'])
def test_biases_are_an_object_or_its_json_text(value: Any) -> None:
    assert parse_params(Text, {"logit_bias": value}).params.logit_bias == {5: -100.0, 7: 2.5}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"5": 101}, "allowed is >= -100 and <= 100"),
        ({"5": float("nan")}, "allowed"),
        ({"5": True}, "allowed"),
        ({"-5": 1}, "allowed"),
        ({"five": 1}, "name ids by their numbers"),
        ({"1" * 40: 1}, "name ids by their numbers"),
        ([5, 1], "send an object of ids and numbers"),
        ("{5", "send a JSON object"),
        ({str(token): 1 for token in range(MOST_BIASED + 1)}, f"at most {MOST_BIASED} items"),
        (json.dumps({str(token): 1 for token in range(MOST_BIASED + 1)}), f"at most {MOST_BIASED} items"),
    ],
)
def test_biases_that_are_none_are_refused_by_name(value: Any, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_params(Text, {"logit_bias": value})
    assert caught.value.field == "logit_bias" and says in f"{caught.value.title} {caught.value.hint}"


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", [-2.1, 2.1, "much"])
def test_penalties_lie_in_openais_range(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{name} is .*, allowed is >= -2 and <= 2"):
        parse_params(Text, {name: value})


@pytest.mark.parametrize("model", SPEAKERS)
def test_the_api_refuses_a_bias_of_an_id_that_the_model_does_not_have(model: str) -> None:
    spec = SPECS[model]
    sampling = spec.node(SPEAKERS[model]).sampling
    assert sampling is not None
    rules = ParamRules(request_id="a", outputs=("text",), unknown="error", limit_s=60)
    assert check_params(spec, {"logit_bias": {sampling.vocab - 1: 1}}, rules).params.logit_bias
    with pytest.raises(RequestError, match=f"the id {sampling.vocab}, outside the model's vocabulary") as caught:
        check_params(spec, {"logit_bias": {sampling.vocab: 1}}, rules)
    assert caught.value.field == "logit_bias"
