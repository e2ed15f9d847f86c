"""Request parameters: any JSON value is refused by name or is within its range (property P17)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar_core.errors import PluginError, RequestError
from mstar_core.plugin import param, param_schema, parse_params
from mstar_core.plugin.params import COMMON_NAMES, param_specs

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    voice: str = param("tara", "speaker", choices=("tara", "leo"), openai="voice")
    temperature: float = param(0.6, "0 is greedy", ge=0, le=2)
    top_p: float = param(0.8, "nucleus", gt=0, le=1)
    max_output_tokens: int = param(100, "ids", ge=1, lt=1000, aliases=("limit",))
    ignore_eos: bool = param(False, "for load tests")
    seed: int | None = param(None, "same seed, same sound", ge=0, le=2**63 - 1)
    ids: tuple[int, ...] | None = param(None, "the prompt as ids", ge=0, max_items=4)


NAMES = [spec.name for spec in param_specs(Params)]


@given(st.sampled_from(NAMES), json_values)
def test_any_value_is_refused_by_name_or_lies_in_its_range(name: str, value: Any) -> None:
    try:
        params = parse_params(Params, {name: value}).params
    except RequestError as error:
        assert error.field == name and name in error.title
        return
    assert params.voice in ("tara", "leo")
    assert 0 <= params.temperature <= 2 and 0 < params.top_p <= 1 and 1 <= params.max_output_tokens < 1000
    assert isinstance(params.ignore_eos, bool)
    assert params.seed is None or 0 <= params.seed < 2**63
    assert params.ids is None or (len(params.ids) <= 4 and all(isinstance(i, int) and i >= 0 for i in params.ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grids:
    floats: tuple[float, ...] | None = param(None, "numbers", ge=-4, lt=2**70)
    free: tuple[float, ...] | None = param(None, "numbers")
    whole: tuple[int, ...] | None = param(None, "whole numbers", gt=-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    floats: float | None = param(None, "a number", ge=-4, lt=2**70)
    free: float | None = param(None, "a number")
    whole: int | None = param(None, "a whole number", gt=-4)


ITEMS = st.integers(-6, 2**65) | st.floats() | st.booleans() | st.sampled_from(["1", "x", 2**64, 10**400, [1]])
LISTS = st.lists(ITEMS, max_size=3) | st.lists(st.floats(-6, 6), max_size=3) | st.lists(st.integers(-6, 6), max_size=3)


@given(st.sampled_from(["floats", "free", "whole"]), LISTS)
def test_a_list_is_taken_as_its_items_are_one_by_one(name: str, items: list[Any]) -> None:
    def taken(kind: type[Any], value: Any) -> Any:
        try:
            return getattr(parse_params(kind, {name: value}).params, name)
        except RequestError:
            return None

    each = tuple(taken(Items, item) for item in items)
    assert repr(taken(Grids, items)) == repr(None if None in each else each)


@given(st.dictionaries(st.text(min_size=1, max_size=6), json_values, min_size=1, max_size=3))
def test_unknown_names_are_errors_that_name_them(given_values: dict[str, Any]) -> None:
    unknown = [n for n, v in given_values.items() if v is not None and n not in (*NAMES, "limit", *COMMON_NAMES)]
    if not unknown:
        return
    with pytest.raises(RequestError) as caught:
        parse_params(Params, given_values)
    assert caught.value.field is not None


def test_a_typo_names_the_nearest() -> None:
    with pytest.raises(RequestError, match="did you mean 'temperature'"):
        parse_params(Params, {"temprature": 1})


def test_unknown_names_may_warn_instead() -> None:
    assert "colour" in parse_params(Params, {"colour": 1}, unknown="warn").warnings[0]


@pytest.mark.parametrize(
    ("sent", "limit"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6, "max_output_tokens": 7}, 7),
        ({"max_output_tokens": None, "max_tokens": 5}, 5),
        ({"limit": 9}, 9),
    ],
)
def test_the_three_names_of_the_output_limit(sent: dict[str, Any], limit: int) -> None:
    parsed = parse_params(Params, sent)
    assert parsed.params.max_output_tokens == limit and not parsed.warnings


@pytest.mark.parametrize("name", ["top_k", "min_p", "repetition_penalty", "stop"])
def test_common_names_without_effect_are_said(name: str) -> None:
    parsed = parse_params(Params, {name: 1})
    assert parsed.common == {name: 1} and name in parsed.warnings[0]


@pytest.mark.parametrize(
    ("kind", "sent", "field"),
    [
        (Items, {"ignore_eos": {"a": 1}}, "ignore_eos"),
        (Items, {"ignore_eos": "maybe"}, "ignore_eos"),
        (Items, {"temperature": 3}, "temperature"),
        (Items, {"top_k": 1.5}, "top_k"),
        (Items, {"logit_bias": {"a": 1}}, "logit_bias"),
        (Items, {"max_tokens": 0}, "max_tokens"),
        (Params, {"max_output_tokens": 5, "max_tokens": [1]}, "max_tokens"),
    ],
)
def test_common_names_without_effect_are_checked(kind: type[Any], sent: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_params(kind, sent)
    assert caught.value.field == field


@pytest.mark.parametrize(("text", "value"), [("YES", True), ("off", False), ("1", True), ("f", False)])
def test_booleans_may_be_words(text: str, value: bool) -> None:
    assert parse_params(Params, {"ignore_eos": text}).params.ignore_eos is value


def test_messages_name_value_and_range() -> None:
    with pytest.raises(RequestError) as caught:
        parse_params(Params, {"temperature": "hot"})
    assert (
        caught.value.title == "temperature is 'hot', allowed is >= 0 and <= 2" and caught.value.hint == "send a number"
    )


def test_a_required_parameter_that_is_missing_is_named() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Needs:
        state: tuple[float, ...] = param(doc="robot state")

    with pytest.raises(RequestError) as caught:
        parse_params(Needs, {})
    assert (caught.value.field, caught.value.code) == ("state", "missing_field")


def test_a_field_without_documentation_is_the_plugins_error() -> None:
    @dataclass(frozen=True)
    class Bare:
        x: int = 1

    with pytest.raises(PluginError, match="'x'"):
        param_specs(Bare)


def test_the_schema_says_the_same() -> None:
    schema = param_schema(Params)["properties"]
    assert schema["temperature"] | {"description": ""} == {
        "description": "",
        "type": "number",
        "minimum": 0,
        "maximum": 2,
        "default": 0.6,
    }
    assert schema["voice"]["enum"] == ["tara", "leo"] and schema["seed"]["type"] == ["integer", "null"]


def test_the_schema_lists_known_values_of_an_open_choice_as_examples() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Open:
        voice: str = param("tara", "speaker", choices=("tara", "leo"), any_choice=True)

    schema = param_schema(Open)["properties"]["voice"]
    assert schema["examples"] == ["tara", "leo"] and "enum" not in schema
