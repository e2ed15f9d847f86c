"""The thinker against the reference: hidden states, logits, greedy ids; in pieces, in batches, in the engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar_core.engine.base import Handle, Job, JobKey, LoopSpec, SamplingParams
from mstar_core.engine.kv.engine import KVCacheEngine, KVSettings
from mstar_core.graph import KV_CACHE, Attend, KVSpec, NodeSpec, Sampling
from mstar_qwen3omni.checkpoint.config import read_config
from mstar_qwen3omni.thinker.thinker import Thinker

from .thinker_cases import CASES, FOLDER, STATES, Case, DenseCache, golden_thinker, needs_weights, prefill, read

pytestmark = needs_weights


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def thinker() -> Thinker:
    return golden_thinker()


def node() -> NodeSpec:
    """The thinker's node for the sizes of the set."""
    config = read_config(FOLDER)
    sizes, width = config.thinker, config.thinker.width
    return NodeSpec(
        name="Thinker",
        engine=KV_CACHE,
        ports={
            "tokens": "i64[n]", "positions": "f32[3,n]", "embeds": f"any[n,{width}]?",
            "deepstack": f"any[{len(config.vision.deepstack)},n,{width}]?", "token": "i64[1]",
            "states": f"any[n,{width}]",
        },
        kv=KVSpec(layers=sizes.layers, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim),
        sampling=Sampling(port="token"),
        sequence=("tokens", "token"),
    )  # fmt: skip


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return read(request.param)


def test_hidden_states_and_logits_of_the_prompt_equal_the_reference(thinker: Thinker, case: Case) -> None:
    found, expected = prefill(thinker, case, DenseCache(), []), case.tensors
    torch.testing.assert_close(found["hidden"], expected["thinker_last_hidden"], atol=STATES, rtol=0)
    torch.testing.assert_close(found["states"], expected["thinker_accept_hidden"], atol=STATES, rtol=0)
    torch.testing.assert_close(thinker.head(found["hidden"]), expected["thinker_prefill_logits"], atol=STATES, rtol=0)


def test_a_prompt_in_pieces_equals_the_whole(thinker: Thinker, case: Case) -> None:
    count = len(case.tokens)
    whole = prefill(thinker, case, DenseCache(), [])
    pieces = prefill(thinker, case, DenseCache(), [count // 3, count // 3 + 1, 2 * count // 3])
    for name, value in whole.items():
        torch.testing.assert_close(pieces[name], value, atol=1e-4, rtol=1e-4)


def test_greedy_steps_equal_the_reference(thinker: Thinker, case: Case) -> None:
    cache, expected = DenseCache(), case.tensors
    logits = [thinker.head(prefill(thinker, case, cache, [])["hidden"][-1:])[0]]
    torch.testing.assert_close(logits[0], expected["thinker_first_logits"], atol=STATES, rtol=0)
    for step in range(len(case.answer) - 1):
        position = expected["thinker_decode_position_ids"][:, step : step + 1].float()
        assert torch.equal(position, (case.positions.max() + 1 + step).expand(3, 1))
        hidden = thinker(kv=cache, positions=position[0], tokens=logits[-1].argmax()[None])["hidden"]
        logits.append(thinker.head(hidden)[0])
    assert [int(row.argmax()) for row in logits] == case.answer.tolist()
    torch.testing.assert_close(torch.stack(logits), expected["thinker_step_logits"], atol=STATES, rtol=0)


def test_a_batch_equals_each_request_alone(thinker: Thinker) -> None:
    cases, cache = [read(name) for name in CASES], DenseCache()
    cache.lengths = [len(case.tokens) for case in cases]
    together = thinker(
        kv=cache, positions=torch.cat([case.positions for case in cases], dim=1),
        tokens=torch.cat([case.tokens for case in cases]), embeds=torch.cat([case.embeds for case in cases]),
        deepstack=torch.cat([case.deepstack for case in cases], dim=1),
    )["hidden"].split(cache.lengths)  # fmt: skip
    for case, found in zip(cases, together, strict=True):
        torch.testing.assert_close(found, case.tensors["thinker_last_hidden"], atol=STATES, rtol=0)


def test_decode_returns_no_states(thinker: Thinker) -> None:
    assert list(thinker(kv=DenseCache(), positions=torch.zeros(1), tokens=torch.zeros(1, dtype=torch.int64))) == [
        "hidden"
    ]


# -- through the engine ------------------------------------------------------------------------------------------------


def segments(case: Case) -> Iterator[tuple[dict[str, Tensor], Attend]]:
    """Cut a prompt into passes of text and of media, as the walks do."""
    ids = read_config(FOLDER).ids
    pads = torch.isin(case.tokens, torch.tensor([ids.image_pad, ids.video_pad, ids.audio_pad]))
    is_seen = torch.isin(case.tokens, torch.tensor([ids.image_pad, ids.video_pad]))
    cuts = [0, *(torch.nonzero(pads[1:] != pads[:-1]).flatten() + 1).tolist(), len(pads)]
    for a, b in itertools.pairwise(cuts):
        tokens = {"tokens": case.tokens[a:b], "positions": case.positions[:, a:b]}
        if pads[a]:
            tokens["embeds"] = case.embeds[a:b]
        if is_seen[a:b].any():
            tokens["deepstack"] = case.deepstack[:, a:b]
        yield tokens, Attend(positions="given")


def answers(thinker: Thinker, cases: list[Case], **changes: Any) -> tuple[list[list[int]], list[Tensor]]:
    """Return greedy ids of several requests at once, and the states of their media."""
    steps = max(len(case.answer) for case in cases)
    longest = max(len(case.tokens) for case in cases) + steps
    options: dict[str, Any] = {
        "device": torch.device("cpu"), "dtype": torch.float32, "vocab": thinker.lm_head.weight.shape[0],
        "page_size": 8, "max_slots": len(cases) + 4, "max_seq_len": 2 * longest, "token_budget": 256,
        "num_pages": (len(cases) + 1) * (longest // 8 + 2),
    }  # fmt: skip
    engine = KVCacheEngine(node(), thinker, KVSettings(**(options | changes)))
    keys, ids, states = itertools.count(1), [list[int]() for _ in cases], [list[Tensor]() for _ in cases]
    waiting = {handle: list(segments(case)) for handle, case in enumerate(cases)}
    loops: dict[int, int] = {}

    def go_on(handle: int) -> None:
        passes, key, outputs = waiting[handle], JobKey(next(keys)), ("token",)
        if passes:
            inputs, attend = passes.pop(0)
            outputs = (*(("token",) if not passes else ()), *(("states",) if "embeds" in inputs else ()))
            is_last = not passes
            job = Job(key=key, handle=Handle(handle), inputs=inputs, attend=attend, outputs=outputs, sample=is_last)
            engine.submit(job)
        elif len(ids[handle]) == 1:
            loop = LoopSpec(max_iters=len(cases[handle].answer) - 1, carry={"token": "token"}, stop_port="token")
            loops[key] = handle
            engine.submit(Job(key=key, handle=Handle(handle), loop=loop, outputs=outputs))

    for handle, case in enumerate(cases):
        engine.open(Handle(handle), SamplingParams(), len(case.tokens) + steps)
        go_on(handle)
    while (running := engine.launch()) is not None:
        result = engine.collect(running)
        assert not result.failed
        for done in result.done:
            handle = int(done.job.handle)
            if "states" in done.outputs:
                states[handle].append(done.outputs["states"])
            if done.job.loop is None and "token" in done.outputs:
                ids[handle].append(int(done.outputs["token"]))
            if done.job.loop is None:
                go_on(handle)
        if result.loop is not None:
            for key, value in zip(result.loop.keys.tolist(), result.loop.ids.tolist(), strict=True):
                ids[loops[key]].append(value)
    return ids, [torch.cat(each) if each else torch.empty(0) for each in states]


@pytest.mark.parametrize("budget", [16, 256], ids=["chunked", "whole"])
def test_the_paged_engine_gives_the_answers_of_the_reference(thinker: Thinker, budget: int) -> None:
    cases = [read(name) for name in CASES]
    ids, states = answers(thinker, cases, token_budget=budget)
    assert dict(zip(CASES, ids, strict=True)) == {name: read(name).answer.tolist() for name in CASES}
    special = read_config(FOLDER).ids
    for case, found in zip(cases, states, strict=True):
        pads = torch.isin(case.tokens, torch.tensor([special.image_pad, special.video_pad, special.audio_pad]))
        if pads.any():
            torch.testing.assert_close(found, case.tensors["thinker_accept_hidden"][pads], atol=STATES, rtol=0)


def test_alone_in_the_engine_equals_the_batch(thinker: Thinker, case: Case) -> None:
    assert answers(thinker, [case])[0] == [case.answer.tolist()]
