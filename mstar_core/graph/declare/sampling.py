"""Sampling parameters: the table from which validation, documentation, wire form and device columns derive.

Each field of `TextSampling` is one parameter: its type, the value that switches it off, range, documentation, OpenAI
name and columns. A new parameter is a field here and its arithmetic in `engine/sampling`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from mstar_core.errors import RequestError

META: Final = "mstar"
"""Key in the metadata of a dataclass field: the keyword arguments of its `ParamSpec`."""

COLUMNS: Final = "columns"
"""Key in the metadata of a sampling parameter: its columns by name."""

INTERNAL: Final = "internal"
"""Key in the metadata of a field that clients cannot set by its name: the api fills it from other fields."""

BIAS: Final = "logit_bias"
"""The parameter that maps ids of the model's vocabulary to numbers."""

MOST_LOGPROBS: Final = 20
"""Largest number of alternatives whose log-probabilities are reported with each id."""

MOST_BIASED: Final = 300
"""Largest number of ids in one `logit_bias`."""


@dataclass(frozen=True, slots=True)
class Column:
    """An array of a draw: `width` numbers per sequence.

    dtype: name of a numpy dtype. off: the number that switches the parameter off; padding has it too. encode: returns
    the column of an array of the parameter's values (None: the same), or, if `width` is above 1, the numbers of one
    value, which may be fewer. adjusts: it changes logits before the draw, so only the adjusting variant of a captured
    step carries it.
    """

    dtype: str
    off: float
    encode: Callable[[Any], Any] | None = None
    width: int = 1
    adjusts: bool = False


def _parameter(off: Any, doc: str, *, columns: Mapping[str, Column], **rules: Any) -> Any:
    return field(default=off, metadata={META: {"doc": doc, **rules}, COLUMNS: columns})


def _internal(off: Any) -> Any:
    return field(default=off, metadata={INTERNAL: True, COLUMNS: {}})


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSampling:
    """Sampling parameters of a request. A model that samples text inherits them in its own parameters."""

    temperature: float = _parameter(
        0.0,
        "0 takes the most likely id",
        ge=0,
        le=2,
        openai="temperature",
        columns={
            "temperature": Column("float32", 1.0, lambda values: values + (values <= 0) * (1 - values)),
            "greedy": Column("bool", True, lambda values: values <= 0),
        },
    )
    top_p: float = _parameter(
        1.0,
        "probability mass of nucleus sampling; 1 is off",
        gt=0,
        le=1,
        openai="top_p",
        # Off is above 1: rounding of a cumulative sum must not cut the tail.
        columns={"top_p": Column("float64", 2.0, lambda values: values + (values >= 1))},
    )
    top_k: int = _parameter(
        0,
        "most likely ids to draw from; 0 is off",
        ge=0,
        columns={"top_k": Column("int64", 0, lambda values: values * (values > 0))},
    )
    min_p: float = _parameter(
        0.0, "least share of the best id's probability; 0 is off", ge=0, le=1, columns={"min_p": Column("float64", 0.0)}
    )
    repetition_penalty: float = _parameter(
        1.0, "over ids of prompt and output; 1 is off", ge=0.01, le=10, columns={"penalty": Column("float32", 1.0)}
    )
    presence_penalty: float = _parameter(
        0.0,
        "subtracted from the logits of ids that the output contains; 0 is off",
        ge=-2,
        le=2,
        openai="presence_penalty",
        columns={"presence": Column("float32", 0.0, adjusts=True)},
    )
    frequency_penalty: float = _parameter(
        0.0,
        "subtracted from the logits of ids once for each time that the output contains them; 0 is off",
        ge=-2,
        le=2,
        openai="frequency_penalty",
        columns={"frequency": Column("float32", 0.0, adjusts=True)},
    )
    logit_bias: dict[int, float] | None = _parameter(  # noqa: RUF009 an immutable default
        None,
        "numbers added to the logits of ids, before everything else",
        ge=-100,
        le=100,
        max_items=MOST_BIASED,
        openai="logit_bias",
        columns={
            "bias_ids": Column("int64", 0, lambda value: list(value or ()), MOST_BIASED, adjusts=True),
            # Adding -0.0 changes no number, not even the sign of a zero.
            "biases": Column("float32", -0.0, lambda value: list((value or {}).values()), MOST_BIASED, adjusts=True),
        },
    )
    constraint: str | None = _internal(None)
    """Grammar that the ids of a text head must obey, as `mstar_core.constraints` writes it; None is off."""
    logprobs: int | None = _internal(None)
    """Reports the log-probability of each id of a text head, and of so many most likely ids; None reports nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(TextSampling):
    """Sampling of one request at one node. The same seed gives the same ids in any batch."""

    seed: int = 0

    @property
    def adjusts(self) -> bool:
        """Whether one of the parameters in ADJUSTING is on. They are off if they are zero or empty."""
        return any(getattr(self, name) for name in ADJUSTING)

    def changed(self, values: Mapping[str, Any]) -> SamplingParams:
        """Return these parameters with other values of some."""
        return dataclasses.replace(self, **values)


NAMES: Final = tuple(item.name for item in dataclasses.fields(TextSampling))
"""Names of all sampling parameters."""

OFFERED: Final = tuple(item.name for item in dataclasses.fields(TextSampling) if INTERNAL not in item.metadata)
"""Names of the sampling parameters that clients can set."""

ADJUSTING: Final = tuple(
    item.name
    for item in dataclasses.fields(TextSampling)
    if any(column.adjusts for column in item.metadata[COLUMNS].values())
)
"""Names of the parameters that change logits before the draw."""


def check_biased(bias: Mapping[int, float] | None, vocab: int, name: str = BIAS) -> None:
    """Raise RequestError if a bias names an id outside a vocabulary of `vocab` ids. name: of the request's field."""
    wrong = next((token for token in bias or () if not 0 <= token < vocab), None)
    if wrong is not None:
        raise RequestError(
            f"{name} has the id {wrong}, outside the model's vocabulary of {vocab} ids",
            hint="use token ids of this model",
            field=name,
            value=wrong,
            allowed=f"0 to {vocab - 1}",
        )
