"""Formats, the input buffer and turns of realtime sound, without a connection."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile

from mstar_core.api.realtime.sound.formats import SoundFormat
from mstar_core.api.realtime.sound.input_buffer import InputBuffer
from mstar_core.api.realtime.sound.resampling import PieceResampler
from mstar_core.api.realtime.sound.turn_detection import FRAME_MS, Edge, TurnDetector, TurnRules
from mstar_core.api.realtime.sound.voice_activity import SileroProbabilities
from mstar_core.errors import RequestError, TooLarge

FILE = Path(__file__).parents[3] / "plugins/mstar-qwen3omni/src/mstar_qwen3omni/checkpoint/mini/seven.wav"

TONE = (np.sin(np.arange(24_000) * 2 * np.pi * 440 / 24_000) * 12_000).astype(np.int16)


@pytest.mark.parametrize(
    ("law", "code", "sample"),
    [
        ("mu", 0xFF, 0),
        ("mu", 0x80, 32124),
        ("mu", 0x00, -32124),
        ("a", 0xD5, 8),
        ("a", 0xAA, 32256),
        ("a", 0x2A, -32256),
    ],
)
def test_the_laws_have_the_values_of_the_standard(law: str, code: int, sample: int) -> None:
    form = SoundFormat(rate=8000, law=law)  # type: ignore[arg-type]
    assert form.decode(bytes([code]), "audio").tolist() == [sample]
    assert form.encode(np.array([sample], np.int16)) == bytes([code])


@pytest.mark.parametrize("law", ["mu", "a"])
def test_telephone_sound_survives_within_the_steps_of_its_law(law: str) -> None:
    form = SoundFormat(rate=8000, law=law)  # type: ignore[arg-type]
    back = form.decode(form.encode(TONE), "audio").astype(int)
    assert np.max(np.abs(back - TONE) / np.maximum(np.abs(TONE), 256)) < 0.04
    codes = np.arange(256, dtype=np.uint8).tobytes()
    again = form.encode(form.decode(codes, "audio"))
    assert form.decode(again, "audio").tolist() == form.decode(codes, "audio").tolist()


def test_half_a_sample_is_refused() -> None:
    with pytest.raises(RequestError, match="3 bytes"):
        SoundFormat().decode(b"abc", "audio")


def test_pieces_are_resampled_as_one_sound() -> None:
    stream = PieceResampler(24_000, 16_000)
    pieces = [stream.push(TONE[start : start + 1000]) for start in range(0, len(TONE), 1000)]
    made = np.concatenate([*pieces, stream.flush()])
    wanted = np.sin(np.arange(16_000) * 2 * np.pi * 440 / 16_000) * 12_000
    assert len(made) == 16_000 and np.abs(made[200:-200] - wanted[200:-200]).max() < 200


def test_the_buffer_keeps_its_place_on_the_time_line() -> None:
    buffer = InputBuffer(1000, longest_s=2)
    for start in range(0, 900, 100):
        buffer.append(np.arange(start, start + 100, dtype=np.int16))
    buffer.forget_before(250)
    assert (buffer.start, buffer.end, buffer.end_ms) == (200, 900, 900)
    assert buffer.take(300, 500).tolist() == list(range(300, 500))
    assert (buffer.start, len(buffer)) == (500, 400)
    buffer.check_room(1.6)
    with pytest.raises(TooLarge, match="2 s"):
        buffer.check_room(1.7)
    buffer.clear()
    assert (len(buffer), buffer.start) == (0, 900)


def edges(detector: TurnDetector, frames: str) -> list[tuple[int, Edge]]:
    """Feed frames: `#` is speech, `+` is above the lower threshold, `.` is silence."""
    values = {"#": 0.9, "+": 0.4, ".": 0.05}
    found = []
    for frame in frames:
        edge = detector.heard(values[frame])
        if edge is not None:
            found.append((detector.now_ms // FRAME_MS, edge))
    return found


RULES = TurnRules(silence_ms=4 * FRAME_MS, prefix_ms=2 * FRAME_MS)


def test_speech_begins_with_two_frames_and_ends_with_silence() -> None:
    detector = TurnDetector(RULES)
    assert edges(detector, "...#..##+#...##....") == [(8, Edge.BEGIN), (19, Edge.END)]
    assert (detector.began_ms, detector.first_ms) == (6 * FRAME_MS, 4 * FRAME_MS)
    assert not detector.is_false_start


def test_a_click_is_no_speech_and_a_short_noise_is_a_false_start() -> None:
    assert edges(TurnDetector(RULES), "..#...#...") == []
    detector = TurnDetector(RULES)
    assert [edge for _, edge in edges(detector, "##....")] == [Edge.BEGIN, Edge.END] and detector.is_false_start


def test_the_silence_of_a_semantic_turn_depends_on_the_words() -> None:
    rules = TurnRules(silence_ms=800, is_semantic=True)
    silences = [rules.silence_after(text) for text in (None, "", "And then", "How are you?")]
    assert silences == [800, 800, 1600, 400]
    assert TurnRules(silence_ms=500).silence_after("How are you?") == 500


def noisy_words(count: int, decibels: float | None) -> np.ndarray:
    """Return a spoken word `count` times with pauses of 1 s, at 16 kHz. decibels: of the words above white noise."""
    word, rate = soundfile.read(FILE, dtype="float32")
    assert rate == 16_000
    quiet = np.zeros(rate, np.float32)
    whole = np.concatenate([quiet, *([word, quiet] * count)])
    if decibels is not None:
        loudness = np.sqrt(np.mean(word**2)) / 10 ** (decibels / 20)
        whole = whole + np.random.default_rng(1).normal(0, loudness, len(whole)).astype(np.float32)
    return (whole.clip(-1, 1) * 32767).astype(np.int16)


@pytest.mark.parametrize("decibels", [None, 10.0])
async def test_words_with_pauses_and_noise_are_turns_without_false_starts_and_missed_ends(
    decibels: float | None,
) -> None:
    detector, found = TurnDetector(TurnRules()), []
    for probability in await SileroProbabilities(16_000).push(noisy_words(6, decibels)):
        edge = detector.heard(probability)
        if edge is Edge.BEGIN:
            found.append(detector.began_ms)
        assert edge is not Edge.END or not detector.is_false_start
    assert len(found) == 6 and not detector.is_speaking
    assert all(abs(began - (1000 + number * 1712)) < 400 for number, began in enumerate(found)), found
