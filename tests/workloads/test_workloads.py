"""Workloads of the installed plugins and generic ones: reproducible, distinct, and within the model's modalities."""

from __future__ import annotations

import itertools
import random

import pytest

from mstar_core.plugin.offers import WorkloadSpec
from mstar_core.workloads import ServedModel, length, picture, recording, sentence, video_array
from mstarctl.bench.load.workloads import GENERIC, check_inputs, hash_of, source_of, workload_of
from mstarctl.bench.show.workloads import card_of, offers
from mstarctl.plugins import Plugins

OFFERED = [(model, spec, card) for model, spec, card in offers(None)]


@pytest.mark.parametrize(
    ("spec", "card"), [(spec, card) for _, spec, card in OFFERED], ids=[f"{m}-{s.name}" for m, s, _ in OFFERED]
)
def test_a_workload_draws_the_same_distinct_requests(spec: WorkloadSpec, card: ServedModel) -> None:
    first, again = (list(itertools.islice(source_of(spec)(card, 3), 3)) for _ in range(2))
    other = list(itertools.islice(source_of(spec)(card, 4), 3))
    assert hash_of(first) == hash_of(again) != hash_of(other)
    assert len({hash_of([request]) for request in first}) == 3
    check_inputs(card, first)


@pytest.mark.parametrize("model", Plugins.discover().models(), ids=lambda model: model.name)
def test_every_model_offers_workloads_within_its_parameters(model: object) -> None:
    plugins = Plugins.discover()
    spec = next(
        offered for offered in plugins.models() if offered is model or offered.name == getattr(model, "name", "")
    )
    actual = plugins.workloads(spec)
    assert actual
    names = {field for field in spec.params.__dataclass_fields__}
    common = {"seed", "max_output_tokens", "ignore_eos"}
    for workload in actual:
        for request in itertools.islice(source_of(workload)(card_of(spec), 0), 2):
            assert set(request.params) <= names | common


def test_a_mix_draws_from_all() -> None:
    card = ServedModel(name="x", endpoints=("/generate",))
    requests = workload_of("mixed", GENERIC).requests(card, 0, 40)
    assert {request.outputs for request in requests} == {("text",), ("audio",)}
    assert any(request.files for request in requests)


def test_media_are_what_they_claim() -> None:
    chance = random.Random(1)
    assert picture(chance, 20, 10).startswith(b"\x89PNG")
    sound = recording(chance, 0.5)
    assert sound.startswith(b"RIFF") and len(sound) == 44 + 16_000
    assert video_array(chance, 4, 16).startswith(b"\x93NUMPY")


def test_text_has_its_words_and_lengths_their_limits() -> None:
    chance = random.Random(2)
    assert len(sentence(chance, 17).split()) == 17
    drawn = sorted(length(chance, 32, 1024) for _ in range(2000))
    assert drawn[0] >= 32 and drawn[-1] <= 1024
    assert 150 < drawn[1000] < 220  # the geometric mean is 181
