"""Known ids of an earlier attempt are taken instead of drawn, and what follows is as if they had been drawn."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mstar_core.engine.base import Handle, LoopSpec
from mstar_core.graph.declare.nodes import Attend
from mstar_core.graph.declare.sampling import SamplingParams
from tests.engine.tiny_engine import VOCAB, Driver, generate, make_engine, prompt
from tests.engine.tiny_talker import SPEECHES, Speech, Talk, TinyTalker, make_talker, reference

STEPS = 24
WARM = SamplingParams(temperature=1.1, top_p=0.9, seed=11)
SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": WARM,
    "penalised": SamplingParams(temperature=0.8, top_k=12, repetition_penalty=1.6, seed=3),
    "adjusted": SamplingParams(
        temperature=0.9, presence_penalty=1.5, frequency_penalty=1.0, logit_bias={5: 3.0, 9: -4.0}, seed=4
    ),
}
IDS = prompt(3, 21)


def whole(sampling: SamplingParams, **changes: object) -> list[int]:
    (ids,) = generate([(IDS, STEPS, sampling)], **changes)
    return ids


def resumed(
    known: list[int], sampling: SamplingParams, *, steps: int = STEPS, stop: tuple[int, ...] = (), **changes: object
) -> tuple[Driver, list[int]]:
    """Run a new attempt with the first ids known. Returns its driver and all its ids."""
    lookahead = int(changes.get("lookahead", 0))  # type: ignore[call-overload]
    driver = Driver(make_engine(**changes), lookahead)
    driver.open(0, sampling)
    first = driver.prefill(0, IDS, tokens_hash_seed=b"", known=known[0])
    loop = driver.decode(0, steps, stop, tuple(known[1:]))
    driver.run()
    assert not driver.failed, driver.failed
    return driver, [int(driver.done[first].outputs["token"]), *driver.ids[loop]]


def others(ids: list[int]) -> list[int]:
    """Ids that would not have been drawn."""
    return [(value + 7) % VOCAB for value in ids]


# -- loops without state --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("graphs", [(), (1, 4)])
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_ids_after_the_cut_equal_the_undisturbed_run(kind: str, graphs: tuple[int, ...], lookahead: int) -> None:
    expected = whole(SAMPLINGS[kind])
    assert len(set(expected)) > 5
    for cut in (1, 2, 3, 9, STEPS):
        _, ids = resumed(expected[:cut], SAMPLINGS[kind], graphs=graphs, lookahead=lookahead)
        assert ids == expected, cut


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_the_continuation_follows_the_known_ids_and_not_those_that_would_be_drawn(kind: str) -> None:
    """Each cut of a diverged history gives the rest of it: penalties, counters and cache hold the known ids alone."""
    forced = others(whole(SAMPLINGS[kind])[:8])
    _, history = resumed(forced, SAMPLINGS[kind])
    assert history[:8] == forced and history != whole(SAMPLINGS[kind])
    for cut in (9, 13, 20):
        assert resumed(history[:cut], SAMPLINGS[kind])[1] == history
    assert resumed(history[:13], SAMPLINGS[kind], graphs=(1, 4), lookahead=1)[1] == history


def test_a_diverged_history_is_that_of_a_prompt_with_its_ids() -> None:
    forced = others(whole(SamplingParams())[:8])
    _, history = resumed(forced, SamplingParams())
    (after,) = generate([(IDS + forced, STEPS - 8, SamplingParams())])
    assert history == forced + after


def test_known_ids_cost_one_pass() -> None:
    expected = whole(WARM)
    driver, _ = resumed(expected[:20], WARM)
    assert len(driver.results) == 2 + STEPS + 1 - 20, "the prompt, the known ids, and one step for each further id"
    first = next(result for result in driver.results if result.loop is not None)
    assert first.loop is not None and first.loop.ids.tolist() == expected[1:20], "all are reported at once"


def test_a_long_known_history_is_computed_in_chunks() -> None:
    expected = whole(WARM)
    driver, ids = resumed(expected[:20], WARM, token_budget=8)
    assert ids == expected and max(result.tokens for result in driver.results) <= 8


@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_last_known_id_may_end_the_loop(lookahead: int) -> None:
    expected = whole(WARM)
    stop = expected[9]
    end = expected[1:].index(stop) + 1
    for known in (expected[: end + 1], expected[: end + 4]):
        driver, ids = resumed(known, WARM, stop=(stop,), lookahead=lookahead)
        (done,) = (done for done in driver.done.values() if done.job.loop is not None)
        assert (ids, done.reason, done.iterations) == (expected[: end + 1], "stop", end)
        assert int(done.outputs["token"]) == stop
    driver, ids = resumed(expected[:10], WARM, steps=9, lookahead=lookahead)
    (done,) = (done for done in driver.done.values() if done.job.loop is not None)
    assert (ids, done.reason, done.iterations) == (expected[:10], "length", 9)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_work_after_a_loop_that_was_known_to_its_end_finds_its_cache(lookahead: int) -> None:
    expected = whole(WARM)
    driver, _ = resumed(expected[:10], WARM, steps=9, lookahead=lookahead)
    second = driver.decode(0, STEPS - 9)
    driver.run()
    assert driver.ids[second] == expected[10:]


def test_the_prompt_of_a_new_attempt_may_come_from_the_prefix_cache() -> None:
    engine, expected = make_engine(), whole(WARM)
    assert generate([(IDS, STEPS, WARM)], engine=engine) == [expected]
    driver = Driver(engine)
    driver.open(9, WARM)
    first = driver.prefill(9, IDS, tokens_hash_seed=b"", known=expected[0])
    loop = driver.decode(9, STEPS, known=tuple(expected[1:12]))
    driver.run()
    assert driver.done[first].cached_tokens == 20 and driver.ids[loop] == expected[1:]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_new_attempts_are_preempted_like_others(lookahead: int) -> None:
    prompts = [prompt(seed, 14) for seed in range(5)]
    samplings = [replace_seed(seed) for seed in range(5)]
    expected = generate([(ids, STEPS, each) for ids, each in zip(prompts, samplings, strict=True)], num_pages=256)
    driver = Driver(make_engine(num_pages=22, lookahead=lookahead, token_budget=12, prefix_cache=False), lookahead)
    keys = []
    for handle, (ids, drawn) in enumerate(zip(prompts, expected, strict=True)):
        driver.open(handle, samplings[handle])
        cut = 4 * handle + 1
        first = driver.prefill(handle, ids, tokens_hash_seed=b"", known=drawn[0])
        keys.append((first, driver.decode(handle, STEPS, known=tuple(drawn[1:cut]))))
    driver.run()
    assert not driver.failed and driver.engine.memory().preempted
    assert [[int(driver.done[first].outputs["token"]), *driver.ids[loop]] for first, loop in keys] == expected


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_preemption_between_chunks_of_known_ids_loses_and_repeats_none(lookahead: int) -> None:
    engine = make_engine(num_pages=15, lookahead=lookahead, token_budget=4, prefix_cache=False)
    (expected,) = generate([(IDS[:4], 44, WARM)], num_pages=64)
    driver = Driver(engine, lookahead)
    driver.open(0)
    driver.prefill(0, IDS[:4])
    driver.decode(0, 40)
    driver.open(1, WARM)
    first = driver.prefill(1, IDS[:4], known=expected[0])
    loop = driver.decode(1, 44, known=tuple(expected[1:42]))
    driver.run()
    assert not driver.failed and engine.memory().preempted
    assert [int(driver.done[first].outputs["token"]), *driver.ids[loop]] == expected


def replace_seed(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.1, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.5, seed=seed)


def test_an_unknown_id_fails_its_request_alone() -> None:
    driver = Driver(make_engine())
    keys = []
    for handle, (first, rest) in enumerate([(VOCAB, ()), (1, (3, VOCAB)), (1, ())]):
        driver.open(handle)
        keys.append((driver.prefill(handle, IDS, known=first), driver.decode(handle, 4, known=rest)))
    driver.run()
    assert set(driver.failed) == {keys[0][0], keys[1][1]} and keys[2][1] in driver.done
    assert "outside the vocabulary" in str(driver.failed[keys[0][0]].error)


@pytest.mark.parametrize("cut", [0, 1, 3, 6])
def test_a_loop_that_is_not_resident_takes_known_ids_and_reports_the_others(cut: int) -> None:
    sampling = SAMPLINGS["adjusted"]

    def run(known: tuple[int, ...]) -> tuple[int, list[int]]:
        driver = Driver(make_engine())
        driver.open(0, sampling)
        driver.prefill(0, IDS)
        # Its tokens are dropped at its end, so that it runs pass by pass.
        spec = LoopSpec(max_iters=6, carry={"token": "token"}, known=known)
        key = driver.submit(0, loop=spec, outputs=("token",), attend=Attend(keep="loop"))
        driver.run()
        assert not driver.failed, driver.failed
        drawn = [value for result in driver.results for each, value in result.draws if each == key]
        return int(driver.done[key].outputs["token"]), drawn

    last, drawn = run(())
    assert len(drawn) == 6 and drawn[-1] == last
    assert run(tuple(drawn[:cut])) == (last, drawn[cut:])


# -- loops that keep state ------------------------------------------------------------------------------------------


def flat(ids: list[int], frames: list[list[int]]) -> tuple[int, ...]:
    """Known iterations: each drawn id, then the frame that was completed before it."""
    return tuple(value for drawn, frame in zip(ids, frames, strict=True) for value in (drawn, *frame))


def talk_again(driver: Driver, handle: int, speech: Speech, ids: list[int], frames: list[list[int]]) -> Talk:
    talk = Talk(driver, handle, speech)
    driver.open(handle, speech.sampling, max_tokens=3 + speech.steps + 1)
    talk.first, talk.loop = talk.begin(known=ids[0]), talk.decode(speech.steps, known=flat(ids[1:], frames))
    return talk


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("graphs", [(), (1, 8)])
@pytest.mark.parametrize("number", range(len(SPEECHES)))
def test_whole_iterations_of_a_loop_with_state_are_taken(number: int, graphs: tuple[int, ...], lookahead: int) -> None:
    speech = SPEECHES[number]
    ids, frames = reference(speech)
    module = TinyTalker()
    driver = Driver(make_talker(module=module, graphs=graphs, lookahead=lookahead), lookahead)
    for handle, cut in enumerate((1, 2, 5, len(frames))):
        module.steps.clear()
        talk = talk_again(driver, handle, speech, ids[: cut + 1], frames[:cut])
        talk.feed()
        driver.run()
        assert talk.result == (ids, frames), cut
        assert graphs or len(module.steps) == len(frames) - cut, "known iterations need no step of their own"
        done = driver.done[talk.loop]
        assert (done.reason, done.iterations) == ("length", len(frames))
        driver.engine.close(Handle(handle))


@pytest.mark.parametrize("lookahead", [0, 1])
def test_known_iterations_wait_for_their_items(lookahead: int) -> None:
    speech = SPEECHES[1]
    ids, frames = reference(speech)
    driver = Driver(make_talker(lookahead=lookahead), lookahead)
    talk = talk_again(driver, 0, speech, ids[:9], frames[:8])
    driver.run()
    assert talk.frames == [] and driver.engine.pages_and_waits()[Handle(0)][1] == "waits for input text"
    for count in (3, 1, 2):
        talk.feed(count)
        driver.run()
        assert talk.frames == frames[: talk.fed]
    talk.feed()
    driver.run()
    assert talk.result == (ids, frames)


def test_frames_that_would_not_be_drawn_are_true_for_what_follows() -> None:
    speech = SPEECHES[1]
    ids, frames = reference(speech)
    forced = [others(frame) for frame in frames[:5]]
    starts = [ids[0], *others(ids[1:6])]
    for before, frame in zip(starts, forced, strict=False):
        frame[0] = before
    first = Driver(make_talker())
    talk = talk_again(first, 0, speech, starts, forced)
    talk.feed()
    first.run()
    assert talk.frames[:5] == forced and talk.ids[:6] == starts and talk.frames[5:] != frames[5:]
    second = Driver(make_talker())
    again = talk_again(second, 0, speech, talk.ids[:9], talk.frames[:8])
    again.feed()
    second.run()
    assert again.result == talk.result


def test_a_known_stop_id_ends_a_loop_with_state() -> None:
    ids, frames = reference(SPEECHES[4])
    speech = replace(SPEECHES[4], stop=ids[6])
    end = ids.index(ids[6])
    driver = Driver(make_talker())
    talk = talk_again(driver, 0, speech, ids[: end + 1], frames[:end])
    talk.feed()
    driver.run()
    assert talk.result == (ids[: end + 1], frames[:end]) and driver.done[talk.loop].reason == "stop"


@pytest.mark.parametrize("lookahead", [0, 1])
def test_new_attempts_with_state_survive_a_preemption(lookahead: int) -> None:
    speeches = [replace(SPEECHES[1], voice=number % 4, sampling=replace(WARM, seed=number)) for number in range(5)]
    expected = [reference(speech) for speech in speeches]
    driver = Driver(make_talker(num_pages=12, lookahead=lookahead), lookahead)
    talks = [
        talk_again(driver, number, speech, ids[: 2 * number + 2], frames[: 2 * number + 1])
        for number, (speech, (ids, frames)) in enumerate(zip(speeches, expected, strict=True))
    ]
    for turn in range(300):
        is_idle = not driver.turn()
        for talk in talks if is_idle or turn % 3 == 0 else ():
            talk.feed(1)
        if all(talk.loop in driver.done for talk in talks):
            break
    assert not driver.failed and driver.engine.memory().preempted
    assert [talk.result for talk in talks] == expected


def test_a_module_that_takes_no_known_iterations_computes_them_again() -> None:
    ids, frames = reference(SPEECHES[1])
    module = TinyTalker()
    module.known_ports = ()  # type: ignore[assignment]
    driver = Driver(make_talker(module=module))
    talk = talk_again(driver, 0, SPEECHES[1], ids[:6], frames[:5])
    talk.feed()
    driver.run()
    assert talk.result == (ids, frames) and len(module.steps) == len(frames)
