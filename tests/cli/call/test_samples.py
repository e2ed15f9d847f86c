"""Samples on the command line: the printed call sends what --sample sends, and the first one is the `try:` line."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from mstar_core.client.results import ModelSample
from mstar_core.errors import ExitCode
from mstar_core.plugin.params import param_schema
from mstar_core.workloads.samples import samples_of
from mstarctl.call.ask import Ask, Card
from mstarctl.call.samples import client_form, first_call
from mstarctl.client.realtime import RealtimeAddress
from mstarctl.commands import call
from mstarctl.main import run
from mstarctl.start.example import example_call
from tests.families.families import SPECS

SOURCES = [
    (name, source)
    for name in sorted(SPECS)
    for source in ("tiny", "mini", "official")
    if source == "official" or SPECS[name].embedded(source)
]


class Api:
    """The client of a served model, of which only the samples are read."""

    def __init__(self, samples: list[ModelSample]) -> None:
        self._samples = samples

    def samples(self) -> list[ModelSample]:
        return self._samples


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Ask]:
    """Requests of `mstarctl call` to a model that `serve` names; nothing is sent."""
    asked: list[Ask] = []
    monkeypatch.setattr(call, "call_once", lambda server, ask, *_, **__: asked.append(ask))
    return asked


def serve(monkeypatch: pytest.MonkeyPatch, model: str, samples: list[ModelSample]) -> None:
    spec = SPECS[model]
    card = Card.of(
        {
            "id": model,
            "input_modalities": [part.kind for part in spec.inputs],
            "output_modalities": [output.kind for output in spec.outputs],
            "parameters": param_schema(spec.params),
        }
    )

    @contextmanager
    def served(*_: object, **__: object) -> Iterator[Any]:
        address, client = RealtimeAddress(url="http://localhost"), cast(Any, Api(samples))
        yield call.Server(name=model, client=client, address=address, card=card, facts={})

    monkeypatch.setattr(call, "served", served)


def plain(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in params.items()}


@pytest.mark.parametrize(("model", "source"), SOURCES)
def test_the_printed_call_sends_what_the_sample_sends(
    model: str,
    source: str,
    sent: list[Ask],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MSTAR_RUNTIME_DIR", str(tmp_path))
    assert run(["sample", model if source == "official" else f"{model}:{source}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    samples = [client_form(sample) for sample in samples_of(SPECS[model], source)]
    assert len(lines) == len(samples)
    serve(monkeypatch, model, samples)
    for line, sample in zip(lines, samples, strict=True):
        program, *words = shlex.split(line)
        assert program == "mstarctl" and run(words) == 0
        assert run(["call", model, "--sample-name", sample.name]) == 0
        printed, same = sent[-2:]
        assert printed.text == same.text and plain(printed.params) == plain(same.params)
        assert printed.files == same.files
        assert same.outputs == sample.output_modalities and set(printed.outputs) <= set(same.outputs)


@pytest.mark.parametrize(("model", "source"), SOURCES)
def test_the_example_of_up_is_the_first_sample(
    model: str, source: str, sent: list[Ask], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    samples = [client_form(sample) for sample in samples_of(SPECS[model], source)]
    serve(monkeypatch, model, samples)
    assert run(["call", model, *shlex.split(example_call(SPECS[model], source))]) == 0
    (ask,) = sent
    assert ask.text == samples[0].text and ask.files == samples[0].files


def test_options_replace_parts_of_a_sample(sent: list[Ask], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, "pi05", [client_form(sample) for sample in samples_of(SPECS["pi05"], "mini")])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "state.json").write_text("[0.1, 1.0]")
    words = ["--sample", "--text", "reach the blue target", "--state", "state.json", "--param", "seed=7"]
    assert run(["call", "pi05", *words]) == 0
    assert sent[0].text == "reach the blue target" and len(sent[0].files) == 3
    assert sent[0].params == {"robot_state": [0.1, 1.0], "seed": 7}


def test_an_unknown_sample_names_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(monkeypatch, "bagel", [client_form(sample) for sample in samples_of(SPECS["bagel"], "mini")])
    assert run(["call", "bagel", "--sample-name", "drawing"]) == ExitCode.USAGE
    assert "its samples: draw, describe, edit" in capsys.readouterr().err


def test_an_example_quotes_its_text() -> None:
    sample = ModelSample(name="a", title="", output_modalities=("text",), text="it costs $5")
    assert shlex.split(first_call([sample])) == ["--text", "it costs $5"]
    assert first_call([]) == ""
