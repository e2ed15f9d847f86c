"""Positions of prompts: golden cases, an independent one-pass rule, and splitting."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar_qwen3omni.processor import Processor
from mstar_qwen3omni.request.media import picture_media, sound_media, video_media
from mstar_qwen3omni.request.positions import Grid, PositionCounter, interleave
from mstar_qwen3omni.request.segments import split

from .conftest import GOLDEN, Golden
from .prompts import WRITES, case_request, placed, talker_placed

CONFIG = GOLDEN.config
IDS = CONFIG.ids
PREFIX = [IDS.im_start, IDS.user, 10]
END = [IDS.im_end, 10, IDS.im_start, IDS.assistant, 10]


def test_golden_prompts_have_the_positions_of_the_reference(golden: Golden, case_name: str) -> None:
    case = golden.case(case_name)
    inputs = Processor(golden.folder, {}).process_prompt(case_request(case))
    assert np.concatenate([s.arrays["tokens"] for s in inputs.segments]).tolist() == case["in.input_ids"].tolist()
    actual = placed(inputs.segments)
    np.testing.assert_allclose(actual, case["thinker_position_ids"], atol=1e-4)
    assert float(actual.max()) + 1 == pytest.approx(float(case["thinker_decode_position_ids"][0, 0]))


def test_golden_prompts_have_the_talkers_tokens_and_positions(golden: Golden, case_name: str) -> None:
    case = golden.case(case_name)
    inputs = Processor(golden.folder, {}).process_prompt(case_request(case))
    names = ["talker_tokens" if segment.kind == "text" else "tokens" for segment in inputs.segments]
    shares = [s.arrays[n] for s, n in zip(inputs.segments, names, strict=True) if n in s.arrays]
    share = np.concatenate(shares)
    user = case["talker_input_ids"][:-9]  # the last 9 stand for the start of the answer
    assert share[:-3].tolist() == user.tolist()
    assert share[-3:].tolist() == case["in.input_ids"][-3:].tolist()
    actual = talker_placed(inputs.segments)
    np.testing.assert_allclose(actual, case["talker_position_ids"][:, : len(share)], atol=1e-4)
    assert actual.max() + 1 + 6 == case["talker_decode_position_ids"][0, 0]


def test_a_written_answer_has_no_share_of_the_talker(golden: Golden, case_name: str) -> None:
    inputs = Processor(golden.folder, {}).process_prompt(case_request(golden.case(case_name), WRITES))
    assert not [name for segment in inputs.segments for name in segment.arrays if name.startswith("talker")]


# -- independent reference ------------------------------------------------------------------------------------------


def one_pass(parts: list[tuple[str, tuple[float, ...]]]) -> list[tuple[float, float, float]]:
    """Return the positions of (kind, facts) parts token by token, as the rule reads.

    text and audio: (count,). image: (rows, columns). video: (pairs, rows, columns, ticks). both: video and sounds.
    """
    p, found = 0.0, []
    for kind, facts in parts:
        if kind in ("text", "audio"):
            found += [(p + k, p + k, p + k) for k in range(int(facts[0]))]
            p += facts[0]
            continue
        pairs, rows, columns, ticks, sounds = (*facts, *(0.0,) * 5)[:5] if kind != "image" else (1, *facts, 0.0, 0)
        pictures = [
            (p + k * ticks, p + i, p + j)
            for k in range(int(pairs))
            for i in range(int(rows))
            for j in range(int(columns))
        ]
        heard = [(p + a, p + a, p + a) for a in range(int(sounds))]
        first = []
        while pictures and heard:
            is_picture = pictures[0][0] - p <= heard[0][0] - p
            first.append((pictures if is_picture else heard).pop(0))
        tail = pictures or heard
        found += first + tail
        p = max(max(token) for token in tail) + 1
    return found


def built(parts: list[tuple[str, tuple[float, ...]]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the thinker's positions of the same parts through the segments of a prompt."""
    ids, media = list(PREFIX), []
    vision = CONFIG.vision
    for kind, facts in parts:
        match kind:
            case "text":
                ids += [5] * int(facts[0])
                continue
            case "audio":
                medium = sound_media(np.zeros((CONFIG.audio.mel_bins, frames_of(int(facts[0]))), np.float32), CONFIG)
            case "image":
                grid = Grid(pairs=1, rows=int(facts[0]), columns=int(facts[1]))
                medium = picture_media(np.zeros((4 * grid.tokens, vision.patch_values), np.uint8), grid, CONFIG)
            case _:
                pairs, rows, columns = (int(fact) for fact in facts[:3])
                grid = Grid(pairs=pairs, rows=rows, columns=columns, pair_ticks=facts[3])
                sound = np.zeros((CONFIG.audio.mel_bins, frames_of(int(facts[4]))), np.float32) if facts[4] else None
                medium = video_media(np.zeros((0, 0), np.uint8), grid, CONFIG, sound)
        ids += [IDS.vision_start, *medium.tokens.tolist(), IDS.vision_end]
        media.append(medium)
    made = split(np.array(ids + END), media, IDS, is_spoken=True)
    return placed(made.inputs), talker_placed(made.inputs)


def frames_of(tokens: int) -> int:
    """Return the mel frames of a sound of so many tokens."""
    whole, rest = divmod(tokens, 13)
    return 100 * whole + 8 * rest


PARTS = st.one_of(
    st.tuples(st.just("text"), st.tuples(st.integers(1, 9))),
    st.tuples(st.just("audio"), st.tuples(st.integers(1, 30))),
    st.tuples(st.just("image"), st.tuples(st.integers(1, 6), st.integers(1, 6))),
    st.tuples(
        st.just("video"),
        st.tuples(
            st.integers(1, 4),
            st.integers(1, 9),
            st.integers(1, 9),
            st.sampled_from([13.0, 26 / 1.5, 26 / 2.4, 6.5, 0.5]),
            st.integers(0, 40),
        ),
    ),
)


@given(st.lists(PARTS, max_size=5))
def test_split_prompts_have_the_positions_of_one_pass(parts: list[tuple[str, tuple[float, ...]]]) -> None:
    laid: list[tuple[str, tuple[float, ...]]] = [("text", (len(PREFIX),))]
    for kind, facts in parts:
        laid += [(kind, facts)] if kind == "text" else [("text", (1,)), (kind, facts), ("text", (1,))]
    expected = np.array(one_pass([*laid, ("text", (len(END),))])).T
    actual, _ = built(parts)
    np.testing.assert_allclose(actual, expected, atol=1e-4)


@given(st.lists(PARTS, max_size=4))
def test_the_talker_places_a_video_with_sound_in_a_row(parts: list[tuple[str, tuple[float, ...]]]) -> None:
    laid: list[tuple[str, tuple[float, ...]]] = [("text", (len(PREFIX),))]
    for kind, facts in parts:
        is_heard = kind == "video" and facts[4] > 0
        here = ("text", (math.prod(facts[:3]) + facts[4],)) if is_heard else (kind, facts)
        laid += [here] if kind == "text" else [("text", (1,)), here, ("text", (1,))]
    expected = np.array(one_pass([*laid, ("text", (len(END),))])).T
    _, actual = built(parts)
    np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_frames_at_a_rate_and_a_half_have_fractional_times() -> None:
    counter = PositionCounter()
    counter.run(4)
    actual = counter.picture(Grid(pairs=3, rows=1, columns=2, pair_ticks=2 / 1.5 * 13))
    np.testing.assert_allclose(actual[0], [4, 4, 4 + 52 / 3, 4 + 52 / 3, 4 + 104 / 3, 4 + 104 / 3], atol=1e-5)
    assert counter.next == pytest.approx(5 + 104 / 3)
    assert counter.run(1) is None


def test_wide_frames_beside_a_short_sound_move_the_text_behind_them_back() -> None:
    grid = Grid(pairs=1, rows=1, columns=30)
    counter = PositionCounter()
    placed = counter.heard_video(grid, interleave(grid, 5))
    assert placed.max() == 29
    assert counter.next == 5  # the tail is the rest of the sound
    after = counter.run(2)
    assert after is not None
    assert after.tolist() == [[5, 6]] * 3
    assert counter.top == 30


def test_video_tokens_precede_sound_tokens_of_the_same_time() -> None:
    grid = Grid(pairs=3, rows=1, columns=1, pair_ticks=2.0)
    assert interleave(grid, 4).tolist() == [False, True, True, False, True, True, False]
