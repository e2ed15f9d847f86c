"""The reference of the gold checks on cases beyond their miniature: cut windows, trained weights, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mstar_core.conformance.fake_api import SampleRequest
from mstar_core.plugin.check.reference import ReferenceRequest
from mstar_core.plugin.conformance import CheckSkipped
from mstar_core.plugin.processor import MediaPart
from mstar_whisper.checkpoint.shipped import FOLDER
from mstar_whisper.reference import reference
from mstar_whisper.sample_inputs import SENTENCE

from .reference import Served, melody, wav, write_checkpoint

OUTPUTS = ("text", "segments")
SENTENCE_FILE = MediaPart(modality="audio", data=SENTENCE.read_bytes(), name=SENTENCE.name)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A checkpoint whose texts have many timestamps."""
    return Served(write_checkpoint(tmp_path_factory.mktemp("whisper") / "random", 10, end_bias=2.0, time_bias=2.5))


def compared(served: Served, file: MediaPart, **params: Any) -> int:
    """Compare the answer of this plugin with that of the reference. Return its number of windows."""
    ask = SampleRequest(
        order=[("audio", 0)], outputs=OUTPUTS, params={"fallback": False, **params}, media=(file,), name="clip"
    )
    chosen, outputs, inputs = served.runtime.api.prepared(ask)
    request = ReferenceRequest(arrays=inputs.arrays, facts=inputs.facts, params=chosen, outputs=frozenset(outputs))
    (answer,) = served.runtime.ask(ask)
    expected = reference(served.folder, request)
    np.testing.assert_array_equal(np.concatenate(answer.of("text")), expected["text"])
    np.testing.assert_allclose(np.concatenate(answer.of("segments")), expected["segments"], atol=1e-3, rtol=1e-3)
    return len(answer.of("segments"))


def test_windows_that_end_within_a_segment_are_those_of_the_model(served: Served) -> None:
    for number in range(2):
        windows = compared(served, wav(melody(1.7, number)), language="en", words=True, max_output_tokens=20)
        assert windows > 2, "two windows hold the recording if none of them is cut"


def test_the_miniature_writes_what_the_reference_writes() -> None:
    assert compared(Served(FOLDER), SENTENCE_FILE) == 1


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"temperature": 0.5}, "a temperature above 0"),
        ({"condition_on_previous": True}, "earlier windows"),
        ({"fallback": True, "logprob_threshold": -0.001}, "a poor window"),
    ],
)
def test_what_it_does_not_compute_is_refused_by_name(served: Served, params: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckSkipped, match=named):
        compared(served, wav(melody(0.6)), max_output_tokens=8, **params)
