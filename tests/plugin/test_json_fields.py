"""Values of JSON files: every error names file and key, also of an object inside another."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstar_core.errors import WeightsError
from mstar_core.plugin.json_fields import JsonFields


@pytest.fixture
def fields(tmp_path: Path) -> JsonFields:
    path = tmp_path / "config.json"
    path.write_text('{"width": 8, "eps": 1e-6, "none": null, "bad": true, "vision": {"layers": -1}, "list": []}')
    return JsonFields.read(path)


def test_values_are_read_and_absent_ones_have_defaults(fields: JsonFields) -> None:
    assert (fields.number("width"), fields.real("eps"), fields.number("none", 3)) == (8, 1e-6, 3)
    assert (fields.get("none", 1), fields.part("absent").number("layers", 2)) == (1, 2)
    assert fields.completed({"width": 1, "depth": 2}).number("depth") == 2
    assert fields.completed({"width": 1}).number("width") == 8


@pytest.mark.parametrize(
    ("key", "words"),
    [("absent", "lacks absent"), ("none", "lacks none"), ("bad", "bad is True"), ("list", "list is []")],
)
def test_a_value_that_is_no_size_is_named(fields: JsonFields, key: str, words: str) -> None:
    for read in (fields.number, fields.real):
        with pytest.raises(WeightsError) as raised:
            read(key)
        assert words in raised.value.title and "config.json" in raised.value.title
        assert raised.value.facts["key"] == key


def test_a_value_of_an_inner_object_has_its_dotted_name(fields: JsonFields) -> None:
    with pytest.raises(WeightsError, match=r"vision\.layers is -1"):
        fields.part("vision").number("layers")
    with pytest.raises(WeightsError, match="list is"):
        fields.part("list")


def test_files_that_are_missing_or_hold_no_object_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(WeightsError, match="is missing"):
        JsonFields.read(path)
    assert JsonFields.read_if_any(path).get("a") is None
    for text, words in (("[]", "does not hold a JSON object"), ("{", "cannot be read")):
        path.write_text(text)
        with pytest.raises(WeightsError, match=words):
            JsonFields.read_if_any(path)
