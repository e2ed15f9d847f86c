"""The reference of the gold checks against the official package: the same sound, for greedy requests alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from mstar_core.errors import PluginError
from mstar_core.plugin.check.reference import ReferenceRequest
from mstar_core.plugin.processor import Inputs
from mstar_qwen3tts.reference import reference

from .driver import inputs_of
from .golden_set import CASES, Case

STEPS = 3
"""Tolerance in steps of 16 bits: the official package sums in another order."""


def request_of(made: Inputs, **changes: object) -> ReferenceRequest:
    params = dataclasses.replace(made.params, **changes)
    return ReferenceRequest(arrays=made.arrays, segments=made.segments, facts=made.facts, params=params)


def test_sound_of_a_case_is_that_of_the_official_package(case: Case) -> None:
    frames = len(case.tensors["codes"])
    found = reference(case.folder, request_of(inputs_of(case), max_output_tokens=frames))["pcm"]
    expected = (case.tensors["waveform"].flatten() * 32767).round().to(torch.int16).numpy()
    # The official package may cut one sample less than whole frames of the recording.
    assert abs(len(found) - len(expected)) <= 1
    assert len(found) % frames == 0
    assert np.abs(found[-1000:].astype(int)).max() > STEPS
    count = min(len(found), len(expected))
    assert np.abs(found[-count:].astype(int) - expected[-count:]).max() <= STEPS


@pytest.mark.parametrize("name", ["temperature", "subtalker_temperature"])
def test_a_request_that_samples_is_refused(name: str) -> None:
    made = inputs_of(Case(CASES[0]))
    with pytest.raises(PluginError, match="most likely codes only"):
        reference(Case(CASES[0]).folder, request_of(made, **{name: 0.9}))
