"""Equality with `transformers` in float32: spectrogram, encoder, ids, segments and times of random checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mstar_core.conformance.runtime import RuntimeSettings
from mstar_core.layers import Checkpoint, load_weights
from mstar_whisper.checkpoint.config import read_config
from mstar_whisper.model import ENCODER, name_map
from mstar_whisper.nodes.encoder import Encoder, Spectrogram
from mstar_whisper.text.words import times

from .reference import Reference, Served, ids_of, melody, write_checkpoint

SECONDS = (0.4, 0.7, 1.0)
LONG_S = 2.7


@pytest.fixture(scope="module", params=[1, 10], ids=["few timestamps", "many timestamps"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Served, Reference]:
    """A served checkpoint and the reference. Most of its texts end by themselves."""
    seed: int = request.param
    bias = {1: 0.0, 10: 2.5}[seed]
    folder = write_checkpoint(tmp_path_factory.mktemp("whisper") / "random", seed, end_bias=2.0, time_bias=bias)
    return Served(folder), Reference(folder)


def test_spectra_and_states_are_those_of_the_reference(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 3)
    config, reference = read_config(folder), Reference(folder)
    encoder, files = Encoder(config), Checkpoint.find(folder)
    load_weights(encoder, files, name_map(files.file_of, ENCODER, ""), None)
    for seconds in (*SECONDS, LONG_S):
        sound = melody(seconds)
        (mel,) = Spectrogram(config)(pcm=[torch.from_numpy(sound)])["mel"]
        wanted = reference.spectrum(sound)[0].T
        assert mel.shape == wanted.shape
        torch.testing.assert_close(mel, wanted, atol=2e-5, rtol=0)
        with torch.inference_mode():
            states = encoder(mel=[mel], place=np.array([[0, config.frames]]))["states"]
            whole = reference.model.model.encoder(wanted.T[None, :, : config.frames]).last_hidden_state
        torch.testing.assert_close(states, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("task", ["transcribe", "translate"])
def test_greedy_ids_are_those_of_the_reference(pair: tuple[Served, Reference], task: str) -> None:
    served, reference = pair
    for number, seconds in enumerate(SECONDS):
        sound = melody(seconds, number)
        for language in ("en", "de"):
            wanted = plain(served, reference.generate(sound, language=language, task=task))
            assert served.ids(sound, language=language, task=task) == wanted


def test_the_language_is_detected_as_by_the_reference(pair: tuple[Served, Reference]) -> None:
    served, reference = pair
    for number, seconds in enumerate(SECONDS):
        sound = melody(seconds, 10 + number)
        assert served.ids(sound) == plain(served, reference.generate(sound, task="transcribe"))


def test_requests_together_give_the_ids_of_each_alone(pair: tuple[Served, Reference]) -> None:
    served, reference = pair
    sounds = [melody(seconds, 20 + number) for number, seconds in enumerate((*SECONDS, *SECONDS))]
    wanted = [plain(served, reference.generate(sound, language="fr", task="transcribe")) for sound in sounds]
    assert [ids_of(answer) for answer in served.ask(*sounds, language="fr")] == wanted


def test_timestamps_and_segments_are_those_of_the_reference(pair: tuple[Served, Reference]) -> None:
    served, reference = pair
    counts = []
    for number, seconds in enumerate((*SECONDS, LONG_S, 1.8)):
        sound = melody(seconds, 30 + number)
        wanted = reference.generate(
            sound, language="en", task="transcribe", return_timestamps=True, return_segments=True
        )["segments"][0]
        got = served.segments(sound, language="en", timestamps=True)["segments"]
        assert [each["tokens"] for each in got] == [each["tokens"].tolist() for each in wanted]
        for mine, theirs in zip(got, wanted, strict=True):
            assert mine["start"] == pytest.approx(float(theirs["start"]), abs=1e-3)
            assert mine["end"] == pytest.approx(float(theirs["end"]), abs=1e-3)
        counts.append(len(got))
    assert max(counts) > 1, "one recording at least has several segments"


def test_earlier_text_is_the_context_of_a_window(pair: tuple[Served, Reference]) -> None:
    served, reference = pair
    sound = melody(LONG_S, 40)
    options: dict[str, Any] = {"language": "en", "task": "transcribe", "return_timestamps": True}
    wanted = reference.generate(sound, condition_on_prev_tokens=True, return_segments=True, **options)["segments"][0]
    got = served.segments(sound, language="en", condition_on_previous=True)["segments"]
    assert [each["tokens"] for each in got] == [each["tokens"].tolist() for each in wanted]


def test_the_scores_of_a_window_are_those_of_the_reference(pair: tuple[Served, Reference]) -> None:
    served, reference = pair
    sound = melody(0.8, 50)
    wanted = reference.generate(
        sound,
        language="en",
        task="transcribe",
        return_timestamps=True,
        return_segments=True,
        output_scores=True,
        return_dict_in_generate=True,
    )["segments"][0][0]["result"]
    scores, ids = wanted["scores"], wanted["sequences"]
    drawn = ids[-len(scores) :] if len(ids) > len(scores) else ids
    mean = float(reference.model._retrieve_avg_logprobs(list(scores), drawn, 0.0))
    got = served.segments(sound, language="en", timestamps=True)["segments"][0]
    assert got["avg_logprob"] == pytest.approx(mean, abs=2e-4)
    assert got["compression_ratio"] == pytest.approx(
        reference.model._retrieve_compression_ratio(drawn, served.config.vocab), rel=1e-4
    )


def test_ids_are_aligned_with_the_sound_as_by_the_reference(pair: tuple[Served, Reference]) -> None:
    served, reference = pair
    sound = melody(1.0, 61)
    found = reference.generate(
        sound, language="en", task="transcribe", return_timestamps=True, return_token_timestamps=True
    )
    wanted = found["token_timestamps"][0].tolist()
    (answer,) = served.ask(sound, outputs=("text", "segments"), language="en", timestamps=True, words=True)
    (record,) = answer.of("segments")
    from mstar_whisper.text.record import COUNT, HEAD

    count = int(record[COUNT])
    ends = times(record[HEAD + count :].reshape(-1, served.config.states))
    assert ends == pytest.approx(wanted[-len(ends) - 1 : -1], abs=1e-4) or ends == pytest.approx(
        wanted[: len(ends)], abs=1e-4
    )


def test_preempted_requests_keep_their_sound(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 5, end_bias=-9.0)
    plenty, scarce = Served(folder), Served(folder, RuntimeSettings(page_size=4, pages=60, slots=8))
    sounds = [melody(0.9, 70 + number) for number in range(4)]
    wanted = [ids_of(answer) for answer in plenty.ask(*sounds, language="en")]
    assert [ids_of(answer) for answer in scarce.ask(*sounds, language="en")] == wanted
    assert scarce.runtime.workers[0].executor._runners["decoder"].memory().preempted > 0


def test_a_poor_window_is_decoded_again_at_a_higher_temperature(pair: tuple[Served, Reference]) -> None:
    served, _ = pair
    sound = melody(0.6, 80)
    kept = served.segments(sound, language="en", fallback=True, logprob_threshold=-100.0, compression_threshold=100.0)
    assert kept["segments"][0]["temperature"] == 0
    raised = served.segments(sound, language="en", fallback=True, logprob_threshold=-0.001, no_speech_threshold=1.0)
    assert raised["segments"][0]["temperature"] == 1
    assert not served.segments(sound, language="en", fallback=True, logprob_threshold=-0.001, no_speech_threshold=0.0)[
        "segments"
    ], "a poor window that is probably silent has no text"


def plain(served: Served, ids: Any) -> list[int]:
    """Return generated ids without the ids of the prompt and the end."""
    known = served.config.ids
    head = {known.start, known.no_times, known.transcribe, known.translate, *known.languages.values()}
    found = ids[0].tolist()
    while found and found[0] in head:
        found.pop(0)
    return found[: found.index(known.end)] if known.end in found else found
