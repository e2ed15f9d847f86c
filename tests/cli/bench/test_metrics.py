"""Metrics over hand-made times: first chunks, playback, cut requests, goals and percentiles."""

from __future__ import annotations

import pytest

from mstar_core.errors import UsageError
from mstarctl.bench.measure.load_metrics import Measures, samples_of
from mstarctl.bench.measure.outcome import Outcome, ReceivedChunk
from mstarctl.bench.measure.playback import silences
from mstarctl.bench.measure.statistics import spread
from mstarctl.bench.measure.terms import judge, parse_terms
from mstarctl.bench.measure.window import MeasuredWindow, summarised
from mstarctl.bench.show.table import note_texts

LATE = Measures(is_late=True)


def outcome(
    *chunks: tuple[str, float, float],
    due: float = 0.0,
    sent: float | None = None,
    end: float | None = None,
    status: str = "ok",
    index: int = 0,
    requested: tuple[str, ...] | None = None,
    usage: dict[str, float] | None = None,
) -> Outcome:
    received = tuple(ReceivedChunk(kind, at, 2, amount) for kind, at, amount in chunks)
    last = chunks[-1][1] if chunks else due
    return Outcome(
        index=index,
        phase=1,
        client=0,
        id=f"b-{index}",
        due_s=due,
        sent_s=due if sent is None else sent,
        headers_s=due,
        end_s=last if end is None else end,
        status=status,
        http_status=200,
        chunks=received,
        usage=usage or {},
        requested=tuple(dict.fromkeys(kind for kind, _, _ in chunks)) if requested is None else requested,
    )


def test_times_count_from_the_intended_moment_in_open_loads() -> None:
    mine = outcome(("text", 2.5, 1.0), due=1.0, sent=2.0)
    assert samples_of(mine, LATE)["ttft"] == [1500.0]
    assert samples_of(mine, Measures(is_late=False))["ttft"] == [500.0]
    assert samples_of(mine, LATE)["service"] == [500.0]
    assert samples_of(mine, LATE)["lag"] == [1000.0]


def test_text_gaps_are_divided_by_the_tokens_of_the_later_chunk() -> None:
    mine = outcome(("text", 1.0, 1.0), ("text", 1.4, 4.0))
    samples = samples_of(mine, LATE)
    assert samples["itl"] == [pytest.approx(100.0)]
    assert samples["tpot"] == [pytest.approx(100.0)]
    assert samples["tokens"] == [5.0]


def test_a_single_chunk_has_no_gaps() -> None:
    samples = samples_of(outcome(("text", 1.0, 1.0)), LATE)
    assert samples["itl"] == [] and "tpot" not in samples


def test_speech_has_its_factors_and_stalls() -> None:
    mine = outcome(("audio", 0.5, 1.0), ("audio", 2.0, 1.0))
    samples = samples_of(mine, LATE)
    assert samples["ttfa"] == [500.0]
    assert samples["rtf"] == [1.0]
    assert samples["stall"] == [pytest.approx(500.0)]
    assert samples["continuity"] == [pytest.approx(0.8)]
    assert samples["viability"] == [0.0]


def test_playback_pauses_until_its_buffer_is_full_again() -> None:
    assert silences([0.0, 1.0, 1.5], [0.5, 0.1, 1.0]) == [pytest.approx(0.5), pytest.approx(0.4)]
    assert silences([0.0, 1.0, 1.5], [0.5, 0.1, 1.0], 0.2) == [pytest.approx(0.8)]
    assert silences([0.0, 0.4, 0.8], [0.5, 0.5, 0.5]) == []
    assert silences([], []) == []


def test_control_rate_is_bounded_by_the_actions_that_are_used() -> None:
    actual = outcome(("action", 0.1, 1.0))
    fast = samples_of(
        Outcome(
            **{**{n: getattr(actual, n) for n in actual.__struct_fields__}, "expected": {"used": 10, "dt_s": 0.02}}
        ),
        LATE,
    )
    assert fast["control"] == [pytest.approx(50.0)]
    assert fast["control_waiting"] == [pytest.approx(10 / 0.3)]
    assert fast["missed"] == [1.0]


def test_successes_that_end_after_the_window_are_noted_where_the_throughput_misses_them() -> None:
    window = MeasuredWindow(start_s=0.0, end_s=10.0)
    early = [outcome(("text", 5.0, 1.0), due=1.0), outcome(("text", 6.0, 1.0), due=1.0)]
    late = [outcome(("text", 12.0, 1.0), due=9.0), outcome(("text", 13.0, 1.0), due=9.0)]
    summary = summarised(late, window, LATE, [])
    assert summary["metrics"]["throughput"]["value"] == 0.0 and summary["ended_after"] == 2
    note = "2 requests ended after the window, and the throughput counts none of them"
    assert note_texts(summary) == [note] and note_texts({**summary, "notes": ["other"]}) == ["other", note]
    assert note_texts(summarised([*early, *late[:1]], window, LATE, [])) == []


def test_requests_that_were_cut_are_longer_than_their_age() -> None:
    whole = [outcome(("text", 0.1, 1.0), due=0.0, index=n) for n in range(9)]
    cut = outcome(due=0.0, end=30.0, status="incomplete", index=9, requested=("text",))
    summary = summarised([*whole, cut], MeasuredWindow(start_s=0.0, end_s=1.0), LATE, [])
    ttft = summary["metrics"]["ttft"]
    assert ttft["p50"] == 100.0 and ttft["p99"] == 30_000.0
    assert ttft["over"] == ["p95", "p99", "p99.9"]


def test_a_request_belongs_to_the_window_of_its_intended_time() -> None:
    inside, outside = outcome(("text", 5.0, 1.0), due=0.5), outcome(("text", 0.9, 1.0), due=-0.1, index=1)
    summary = summarised([inside, outside], MeasuredWindow(start_s=0.0, end_s=1.0), LATE, [])
    assert summary["intended"] == 1
    assert summary["metrics"]["throughput"]["value"] == 1.0  # what ended in the window


def test_goodput_needs_every_term_and_skips_other_modalities() -> None:
    goals = parse_terms("ttft<300ms,rtf<0.8", "--slo", is_goal=True)
    good = outcome(("text", 0.2, 1.0))
    slow = outcome(("text", 0.4, 1.0), index=1)
    mute = outcome(("text", 0.2, 1.0), index=2, requested=("text", "audio"))
    summary = summarised([good, slow, mute], MeasuredWindow(start_s=0.0, end_s=1.0), LATE, goals)
    assert summary["metrics"]["goodput"]["value"] == 1.0
    assert summary["attained"] == {"ttft<300ms": pytest.approx(2 / 3), "rtf<0.8": 0.0}


def test_percentiles_are_by_nearest_rank_and_few_samples_are_marked() -> None:
    actual = spread(list(range(1, 101)))
    assert (actual["p50"], actual["p90"], actual["p99"]) == (50.0, 90.0, 99.0)
    assert actual["few"] == ["p95", "p99", "p99.9"]
    assert spread([])["n"] == 0
    assert spread([7.0])["p99.9"] == 7.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("p99.ttftt<1s", "no metric"),
        ("ttft<300ms", "single value"),
        ("p98.ttft<1s", "not computed"),
        ("p99.ttft<1GB", "unit"),
        ("p50.goodput>1", "goodput"),
        ("error_rate", "not a term"),
    ],
)
def test_wrong_assertions_are_usage_errors(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_terms(text, "--assert", is_goal=False)


def test_an_unknown_metric_names_the_nearest() -> None:
    with pytest.raises(UsageError) as raised:
        parse_terms("p99.tfft<1s", "--assert", is_goal=False)
    assert "ttft" in raised.value.hint


def test_units_are_converted() -> None:
    terms = parse_terms("p99.ttft<0.5s, error_rate<1%, goodput>=3.8/s", "--assert", is_goal=False)
    assert [term.value for term in terms] == [500.0, 0.01, 3.8]


def test_an_assertion_on_few_samples_fails_unless_allowed() -> None:
    (term,) = parse_terms("p99.ttft<500ms", "--assert", is_goal=False)
    metrics = {"ttft": spread([100.0] * 20)}
    assert not judge(term, metrics, allows_few=False).holds
    assert "needs 1000" in judge(term, metrics, allows_few=False).why
    assert judge(term, metrics, allows_few=True).holds


@pytest.mark.parametrize(
    ("marks", "buffer_s", "dry"),
    [
        ([], 0.0, []),
        ([5.0], 0.0, []),
        ([0.0, 0.1, 0.2], 0.0, []),  # each just in time
        ([0.0, 0.01, 0.02, 0.3], 0.0, []),  # sound that arrived early covers the gap before the late chunk
        ([0.0, 0.13, 0.2], 0.0, [0.03]),  # late once; the silence has shifted everything after it
        ([0.0, 0.13, 0.27], 0.0, [0.03, 0.04]),
        ([0.0, 0.13, 0.27], 0.1, []),  # a start buffer covers both
        ([0.0, 0.25], 0.1, [0.05]),
        ([3.0, 3.35], 0.1, [0.15]),
    ],
)
def test_playback_has_these_silences(marks: list[float], buffer_s: float, dry: list[float]) -> None:
    assert silences(marks, [0.1] * len(marks), buffer_s) == pytest.approx(dry)
