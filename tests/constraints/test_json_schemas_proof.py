"""JSON of a grammar obeys its schema: texts drawn from grammars of many schemas, and bounds that exclude zero."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from bench.families.schemas import DIGIT, drawn, fault, proof_schemas, whole, written
from mstar_core.constraints.answers import of_answer
from mstar_core.constraints.checker import GrammarChecker
from mstar_core.constraints.content import JsonText
from mstar_core.constraints.vocabulary import TokenTable
from mstar_core.plugin.chat.format import ChatFormat

llguidance = pytest.importorskip("llguidance")

END = 256
BYTES = TokenTable([*(bytes([byte]) for byte in range(END)), b"<|end|>"], special=[END], ends=[END])
CLOSING = frozenset(b'"}]') | {END}
MOST = 600


def grammar_of(schema: dict[str, Any]) -> str:
    return of_answer(ChatFormat(), content=JsonText(schema=schema, is_strict=True))


def written_by(grammar: str, source: random.Random) -> str | None:
    """Return a text of a grammar that likes to end, None if it does not end in time."""
    matcher, text = llguidance.LLMatcher(BYTES.tokenizer, grammar, log_level=0), bytearray()
    for _ in range(MOST):
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.nonzero(np.unpackbits(mask, bitorder="little"))[0].tolist()
        closing = [byte for byte in allowed if byte in CLOSING]
        byte = source.choice(closing if closing and source.random() < 0.3 else allowed)
        assert matcher.consume_token(byte)
        if byte == END:
            return text.decode()
        text.append(byte)
    return None


def admits(schema: dict[str, Any], text: str) -> bool:
    matcher = llguidance.LLMatcher(BYTES.tokenizer, grammar_of(schema), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting())


def test_texts_of_many_grammars_obey_their_schemas() -> None:
    checker, ended = GrammarChecker(None, {}), 0
    schemas = proof_schemas()
    assert len(schemas) == 200
    for name, schema in schemas.items():
        grammar = grammar_of(schema)
        assert checker.problem(grammar) == "", name
        text = written_by(grammar, random.Random(name))
        if text is not None:
            ended += 1
            assert fault(schema, text) == "", (name, text)
    assert ended >= 190


@pytest.mark.parametrize("bound", [0.5, 0.001, 1, 3.5, None])
def test_a_bound_that_excludes_zero_admits_the_numbers_beside_it(bound: float | None) -> None:
    for sign, exclusive, other in ((1, "exclusiveMinimum", "maximum"), (-1, "exclusiveMaximum", "minimum")):
        schema: dict[str, Any] = {"type": "number", exclusive: 0, **({} if bound is None else {other: sign * bound})}
        for text in ("0", "-0", "0.0", "0e0", "0.0005", "0.25", "2", "-0.0005", "-0.25", "-2"):
            value = Decimal(text)
            obeys = sign * value > 0 and (bound is None or abs(value) <= Decimal(str(bound)))
            assert not admits(schema, text) or obeys, (schema, text)
            assert admits(schema, text) or not obeys, (schema, text)


def test_exclusive_bounds_are_found_wherever_a_schema_is_and_nowhere_else() -> None:
    small = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}
    for schema, wrap in (
        ({"anyOf": [small, {"type": "null"}]}, "{}"),
        ({"type": "array", "items": small}, "[{}]"),
        ({"type": "array", "prefixItems": [small], "items": False}, "[{}]"),
        (whole({"a": {"$ref": "#/$defs/small"}}, **{"$defs": {"small": small}}), '{{"a":{}}}'),
        ({"type": "object", "additionalProperties": small}, '{{"b":{}}}'),
    ):
        assert admits(schema, wrap.format("0.25")) and not admits(schema, wrap.format("0")), schema
    assert admits(whole({"exclusiveMinimum": DIGIT}), '{"exclusiveMinimum":0}')
    assert admits({"const": {"exclusiveMinimum": 0}}, '{"exclusiveMinimum":0}')
    assert admits({"type": "integer", "exclusiveMinimum": 0, "minimum": 3}, "3")
    assert not admits({"type": "integer", "exclusiveMinimum": 0, "minimum": 3}, "2")


def test_drawn_schemas_are_the_same_in_every_run_and_the_judge_finds_faults() -> None:
    assert drawn(5) == drawn(5) and drawn(5, seed=2) != drawn(5)
    digit = written()["integer from 0 to 9"]
    assert fault(digit, "7") == "" and "maximum" in fault(digit, "10") and fault(digit, "7,").startswith("not JSON")
    assert fault({"type": "number", "multipleOf": 0.01}, "0.07") == "", "exact, where floats are not"
    assert fault({"format": "date-time"}, json.dumps("2024-02-30T10:00:00Z")) != ""
