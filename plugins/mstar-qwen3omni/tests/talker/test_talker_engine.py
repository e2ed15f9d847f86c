"""The talker in the KV engine: prompt passes, opening, and a resident loop with its stream, state and draws."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar_core.engine.base import Handle, JobKey, LoopSpec
from mstar_core.graph import RANDOM, Attend, GraphNode, Loop, NodeSpec
from mstar_core.graph.compile.resident import LoopPorts, loop_ports
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.layers import rng
from mstar_qwen3omni.checkpoint.config import OmniConfig
from mstar_qwen3omni.graph import build
from mstar_qwen3omni.params import VOICES
from mstar_qwen3omni.talker.talker import Talker
from tests.engine.tiny_engine import Driver, engine_of

from .driver import CASES, SPECIAL_CODES, VOICE, Case, Choose, read_case, speak

STATES = ("code0", "last_hidden", "text_ended")
RULE = ("code_predictor_temperature", "code_predictor_top_k", "code_predictor_top_p")
GREEDY = SamplingParams(repetition_penalty=1.05)
PAGE = 8


def loop_of(config: OmniConfig) -> tuple[NodeSpec, LoopPorts]:
    """Return the talker's node and the ports of its loop, from the graph for the sizes of the set."""
    graph = build(config)
    loop = graph.talker["talker_decode"]
    assert isinstance(loop, Loop) and isinstance(loop.body, GraphNode)
    ports = loop_ports(loop, loop.body)
    assert ports is not None
    return loop.body.spec, ports


@dataclass(frozen=True)
class Wish:
    """One request: a case, its voice, and the sampling of both kinds of codes."""

    case: Case
    steps: int
    voice: int = VOICES.index(VOICE)
    sampling: SamplingParams = GREEDY
    heat: float = 0.0


@dataclass(frozen=True)
class Answer:
    """Codes of group 0, frames, and why the loop ended."""

    tokens: list[int]
    frames: list[list[int]]
    reason: str


def passes(case: Case) -> Iterator[tuple[dict[str, Tensor], Attend]]:
    """Cut the prompt before the opening into passes of text and of media, as the walks do."""
    ids = torch.cat([case.ids[:-9], torch.tensor(case.start)])
    media = torch.cat([case.is_media[:-9], torch.zeros(3, dtype=torch.bool)])
    cuts = [0, *(torch.nonzero(media[1:] != media[:-1]).flatten() + 1).tolist(), len(ids)]
    taken = 0
    for first, last in itertools.pairwise(cuts):
        if media[first]:
            states = case.states[None, taken : taken + last - first]
            taken += last - first
            yield {"states": states, "positions": case.positions[:, first:last]}, Attend(positions="given")
        else:
            yield {"tokens": ids[first:last]}, Attend()


def lengths_of(wishes: list[Wish]) -> list[int]:
    """Return the tokens of each request, rounded up to pages."""
    return [-(-(len(wish.case.ids) + wish.steps + 1) // PAGE) * PAGE for wish in wishes]


def make_engine(talker: Talker, wishes: list[Wish], **changes: Any) -> Any:
    """Return an engine with room for these requests."""
    config, lengths = wishes[0].case.config, lengths_of(wishes)
    spec, ports = loop_of(config)
    settings: dict[str, Any] = {
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "page_size": PAGE,
        "max_slots": len(wishes) + 16,
        "num_pages": 2 * sum(lengths) // PAGE,
        "max_seq_len": 2 * max(lengths),
        "vocab": config.talker.vocab,
        "token_budget": 256,
        "prefix_cache": False,
        "loop": ports,
    }
    return engine_of(spec, talker, **(settings | changes))


def answers(talker: Talker, wishes: list[Wish], **changes: Any) -> list[Answer]:
    """Run requests together and return their answers."""
    return run(talker, wishes, **changes)[0]


def run(
    talker: Talker, wishes: list[Wish], *, lookahead: int = 0, pace: int = 0, engine: Any = None, **changes: Any
) -> tuple[list[Answer], Driver]:
    """Run requests together. pace: turns between two ids of text; 0 gives all ids at the start. engine: a used one."""
    config = wishes[0].case.config
    driver = Driver(engine or make_engine(talker, wishes, lookahead=lookahead, **changes), lookahead)
    firsts, loops, texts = [], [], [wish.case.texts[1:] for wish in wishes]
    for handle, wish in enumerate(wishes):
        driver.open(handle, wish.sampling, max_tokens=len(wish.case.ids) + wish.steps + 1)
        for inputs, attend in passes(wish.case):
            driver.submit(handle, inputs=inputs, attend=attend, sample=False)
        opening = {"text": torch.tensor(wish.case.texts[:1]), "$param:voice": torch.tensor(wish.voice)}
        firsts.append(driver.submit(handle, inputs=opening, outputs=STATES, attend=Attend(tokens=6)))
        rule = (torch.tensor(wish.heat), torch.tensor(50), torch.tensor(0.8))
        loop = LoopSpec(
            max_iters=wish.steps - 1,
            carry={name: name for name in STATES},
            stop_port="code0",
            stop_ids=(config.codec.eos,),
            emit=("frame",),
            feed="text",
            after_end="empty",
        )
        given = {f"$param:{name}": value for name, value in zip(RULE, rule, strict=True)}
        loops.append(driver.submit(handle, inputs=given, outputs=STATES, attend=Attend(tokens=1), loop=loop))
    for turn in itertools.count():
        for loop, left in zip(loops, texts, strict=True):
            if pace == 0 and turn == 0:
                driver.engine.feed(JobKey(loop), left, True)
            elif pace and turn % pace == 0 and turn // pace <= len(left):
                at = turn // pace
                driver.engine.feed(JobKey(loop), left[at : at + 1], at == len(left))
        if not driver.turn() and (pace == 0 or turn > 400):
            break
    assert not driver.failed, driver.failed
    for handle in range(len(wishes)):
        driver.engine.close(Handle(handle))
    assert driver.engine.memory().pages_used == driver.engine.memory().slots_used == 0
    found = [
        Answer(
            [int(driver.done[first].outputs["code0"]), *driver.ids.get(loop, [])],
            [item.outputs["frame"].tolist() for item in driver.emissions.get(loop, [])],
            driver.done[loop].reason,
        )
        for first, loop in zip(firsts, loops, strict=True)
    ]
    return found, driver


def wishes(config: OmniConfig) -> list[Wish]:
    """A greedy request for each case, of the length of its reference."""
    return [Wish(case, len(case.tensors["talker_tokens"])) for case in (read_case(name, config) for name in CASES)]


def check(found: Answer, case: Case) -> None:
    assert found.tokens == case.tensors["talker_tokens"].tolist(), case.name
    assert torch.equal(torch.tensor(found.frames).T, case.tensors["codes"]), case.name


@pytest.mark.parametrize("changes", [{}, {"token_budget": 16}, {"graphs": (1, 4, 8)}], ids=["plain", "chunked", "step"])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_greedy_answers_of_all_cases_equal_the_reference(
    talker: Talker, config: OmniConfig, changes: dict[str, Any], lookahead: int
) -> None:
    together = wishes(config)
    for actual, wish in zip(answers(talker, together, lookahead=lookahead, **changes), together, strict=True):
        check(actual, wish.case)


def test_one_request_alone_equals_the_reference(talker: Talker, case: Case) -> None:
    check(answers(talker, [Wish(case, len(case.tensors["talker_tokens"]))])[0], case)


def test_text_that_comes_late_changes_nothing(talker: Talker, config: OmniConfig) -> None:
    together = wishes(config)
    for actual, wish in zip(answers(talker, together, lookahead=1, pace=3), together, strict=True):
        check(actual, wish.case)


def sampled(config: OmniConfig) -> list[Wish]:
    made = []
    for row, name in enumerate(CASES):
        params = SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05, seed=row)
        made.append(Wish(read_case(name, config), 9 + row, row % len(VOICES), params, heat=1.0))
    return made


def test_sampled_answers_do_not_depend_on_the_batch(talker: Talker, config: OmniConfig) -> None:
    """Alone, together, in captured shapes, with late text, after preemption."""
    together = sampled(config)
    alone = [answers(talker, [wish])[0] for wish in together]
    assert answers(talker, together) == alone
    captured, driver = run(talker, together, lookahead=1, graphs=(4, 8))
    assert captured == alone and driver.engine.graph_counts is not None and driver.engine.graph_counts.hits > 8
    assert answers(talker, together, lookahead=1, pace=2) == alone
    lengths = lengths_of(together)
    preempted, driver = run(talker, together, num_pages=max(max(lengths), sum(lengths) * 3 // 5) // PAGE)
    assert preempted == alone and driver.engine.memory().preempted > 0


@pytest.mark.parametrize("budget", [20, 256])
def test_captured_prompt_passes_give_the_same_answers(talker: Talker, config: OmniConfig, budget: int) -> None:
    """Text, media with given positions, and the opening with its values per sequence; a budget of 20 cuts them."""
    together = sampled(config)
    plain = answers(talker, together)
    engine = make_engine(talker, together, lookahead=1, graphs=(8,), token_budget=budget)
    assert run(talker, together, lookahead=1, engine=engine)[0] == plain
    while engine.idle():
        pass
    before = engine.counters()
    assert before["prefill_hits"] == 0 and before["prefill_misses"] > 0
    assert run(talker, together, lookahead=1, engine=engine)[0] == plain
    after = engine.counters()
    assert after["prefill_hits"] > 2 and after["prefill_misses"] == before["prefill_misses"]


def drawn_by_definition(config: OmniConfig, params: SamplingParams) -> Choose:
    """Return the draw of code 0 by section 12: penalty, suppression, temperature, top-k, then one number."""
    special = range(config.talker.vocab - SPECIAL_CODES, config.talker.vocab)

    def choose(logits: Tensor, before: list[int]) -> int:
        scores = logits.double().numpy()
        for code in set(before):
            scores[code] *= params.repetition_penalty if scores[code] < 0 else 1 / params.repetition_penalty
        scores[[code for code in special if code != config.codec.eos]] = -np.inf
        best = np.argsort(-scores / params.temperature, kind="stable")[: params.top_k]
        mass = np.exp((scores[best] - scores[best[0]]) / params.temperature).cumsum()
        with np.errstate(over="ignore"):
            chance = rng.uniform_host(rng.seeded(np.array([params.seed])), np.array([len(before)]))[0]
        return int(best[int((mass <= chance * mass[-1]).sum())])

    return choose


@pytest.mark.parametrize("seed", [0, 5])
def test_a_sampled_answer_equals_the_definition(talker: Talker, case: Case, seed: int) -> None:
    params = SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05, seed=seed)
    states = rng.named_host(np.array([seed]), zlib.crc32(f"Talker{RANDOM}".encode()))

    def numbers(drawn: int) -> Tensor:
        return torch.from_numpy(rng.uniforms_host(states, np.array([drawn]), case.config.groups - 1))

    plain = speak(talker, case, 10, seed=seed, choose=drawn_by_definition(case.config, params), randoms=numbers)
    (actual,) = answers(talker, [Wish(case, 10, sampling=params, heat=1.0)])
    assert actual.tokens == plain.tokens and actual.frames == [frame.tolist() for frame in plain.frames]


def test_the_seed_decides_about_all_codes(talker: Talker, config: OmniConfig) -> None:
    case = read_case(CASES[0], config)
    params = [SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05, seed=seed) for seed in (1, 1, 2)]
    one, same, other = answers(talker, [Wish(case, 8, sampling=param, heat=1.0) for param in params])
    assert one == same and one.frames != other.frames
    greedy = [SamplingParams(repetition_penalty=1.05, seed=seed) for seed in (1, 2)]
    first, second = answers(talker, [Wish(case, 8, sampling=each, heat=1.0) for each in greedy])
    assert first.frames[0][0] == second.frames[0][0] and first.frames[0] != second.frames[0]


def test_the_end_token_ends_the_loop_without_a_frame(talker: Talker, case: Case) -> None:
    expected = case.tensors
    steps = len(expected["talker_tokens"])
    at = min(3, steps - 1)
    state, best = expected["talker_last_hidden"][at], expected["talker_step_logits_raw"][at].max()
    row = talker.codec_head.weight[case.config.codec.eos]
    before = row.clone()
    row.copy_(state * (1.5 * best / state.square().sum()))
    actual = answers(talker, [Wish(case, steps)], lookahead=1, graphs=(1,))[0]
    row.copy_(before)
    assert actual.reason == "stop"
    assert actual.tokens == [*expected["talker_tokens"][:at].tolist(), case.config.codec.eos]
    assert torch.equal(torch.tensor(actual.frames).T, expected["codes"][:, :at])


def test_the_engine_equals_the_plain_loop_for_other_voices(talker: Talker, config: OmniConfig) -> None:
    case = read_case(CASES[-1], config)
    actual = answers(talker, [Wish(case, 8, voice) for voice in range(len(VOICES))])
    for name, answer in zip(VOICES, actual, strict=True):
        plain = speak(talker, case, 8, voice=name)
        assert (answer.tokens, answer.frames) == (plain.tokens, [frame.tolist() for frame in plain.frames])
