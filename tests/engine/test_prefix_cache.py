"""Prefix cache over the turns of a conversation: ids that a request generated are found by the next one's prompt."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar_core.engine.base import Handle, LoopSpec
from mstar_core.engine.cache.prefix_cache import ContentChain
from mstar_core.graph.compile.resident import LoopPorts
from mstar_core.graph.declare.nodes import Attend
from tests.engine.fake_device import PAGE, VOCAB, FakeNode, alone
from tests.engine.tiny_engine import Driver, make_engine, prompt, reference


def ask(node: FakeNode, handle: int, ids: list[int], steps: int, stop: tuple[int, ...] = ()) -> tuple[list[int], int]:
    """Run one request and close it. Returns its ids, and the prompt ids that the cache supplied."""
    node.open(handle, 90)
    first, loop = (
        node.prefill(handle, ids, tokens_hash_seed=b"ids"),
        node.decode(handle, steps, stop, tokens_hash_seed=b"ids"),
    )
    node.run()
    assert not node.failed
    node.scheduler.close(Handle(handle))
    return [int(node.done[first].outputs["token"]), *node.ids.get(loop, [])], node.done[first].cached_tokens


def decode_until(node: FakeNode, loop: int, count: int) -> None:
    """Run a node until a loop has drawn so many ids or has ended. Steps stay in flight."""
    while len(node.ids.get(loop, [])) < count and loop not in node.done:
        before = len(node.running)
        if node.scheduler.pressure().ready:
            node.launch()
        if len(node.running) > node.lookahead or len(node.running) == before:
            node.collect()


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("length", range(5, 5 + PAGE))
def test_a_second_turn_computes_only_what_is_new(lookahead: int, length: int) -> None:
    node, ids = FakeNode(lookahead=lookahead, budget=6), list(range(length))
    answer, cached = ask(node, 0, ids, 9)
    assert answer == alone(ids, 9) and cached == 0
    history = [*ids, *answer]
    answer, cached = ask(node, 1, [*history, 70, 71], 9)
    assert answer == alone([*history, 70, 71], 9)
    known = len(history) - 1  # the last id was drawn and never read
    assert cached == known // PAGE * PAGE
    history += [70, 71, *answer]
    assert ask(node, 2, [*history, 72], 3)[1] == (len(history) - 1) // PAGE * PAGE
    assert node.memory.use().pages_used == 0


def test_an_id_that_ended_the_loop_is_not_taken_for_a_cached_one() -> None:
    ids = [1, 2, 3]
    plain = alone(ids, 12)
    stop = plain[PAGE]  # the page of the stop id would be full with it
    kept = plain[: plain.index(stop) + 1]
    for lookahead in (0, 1):
        node = FakeNode(lookahead=lookahead)
        assert ask(node, 0, ids, 12, stop=(stop,))[0] == kept
        for last in (stop, 99):
            prompt_ids = [*ids, *kept[:-1], last, 50, 51, 52]
            answer, cached = ask(node, 1, prompt_ids, 5)
            assert answer == alone(prompt_ids, 5) and cached <= len(ids) + len(kept) - 1


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("turns", [2, 3, 4, 5])
def test_a_cancelled_answer_leaves_the_pages_of_the_ids_that_it_has(lookahead: int, turns: int) -> None:
    node, ids = FakeNode(lookahead=lookahead), list(range(6))
    node.open(0, 90)
    node.prefill(0, ids, tokens_hash_seed=b"ids")
    loop = node.decode(0, 60, tokens_hash_seed=b"ids")
    decode_until(node, loop, turns)
    node.launch()  # ids of steps in flight are not known yet
    assert len(node.running) == lookahead + 1
    heard = alone(ids, 60)[: 1 + len(node.ids.get(loop, []))]
    node.memory.slots.history[:, len(ids) + len(heard) :] = 77
    node.scheduler.close(Handle(0))
    while node.running:
        node.collect()
    for handle, cut in enumerate((len(heard), len(heard) // 2 + 1), start=1):
        prompt_ids = [*ids, *heard[:cut], 77, 77, 77, 77, 77]
        answer, cached = ask(node, handle, prompt_ids, 7)
        assert answer == alone(prompt_ids, 7)
        assert cached >= (len(ids) + cut - 1) // PAGE * PAGE
    assert node.memory.use().pages_used == 0


def test_a_cancelled_prompt_leaves_the_pages_that_were_computed() -> None:
    node, ids = FakeNode(budget=8), list(range(30))
    node.open(0, 90)
    node.prefill(0, ids, tokens_hash_seed=b"ids")
    for _ in range(2):
        node.launch()
        node.collect()
    node.scheduler.close(Handle(0))
    answer, cached = ask(node, 1, ids, 4)
    assert answer == alone(ids, 4) and cached == 16


def test_a_failed_request_leaves_no_page_of_its_answer() -> None:
    node, ids = FakeNode(), list(range(6))
    node.open(0, 90)
    first, loop = node.prefill(0, ids, tokens_hash_seed=b"ids"), node.decode(0, 60, tokens_hash_seed=b"ids")
    for _ in range(8):
        node.launch()
        node.collect()
    heard = [int(node.done[first].outputs["token"]), *node.ids[loop]]
    node.device.fails = {0, *range(16)}
    node.launch()
    node.collect()
    assert list(node.failed) == [loop]
    node.device.fails = set()
    node.scheduler.close(Handle(0))
    node.failed.clear()
    assert ask(node, 1, [*ids, *heard, 80], 3)[1] == len(ids) // PAGE * PAGE


def test_a_second_loop_and_a_further_prompt_of_one_request_go_on_in_the_chain() -> None:
    for end in ("close", "none"):
        node, ids = FakeNode(), list(range(5))
        node.open(0, 90)
        first, one = node.prefill(0, ids, tokens_hash_seed=b"ids"), node.decode(0, 7, tokens_hash_seed=b"ids")
        node.prefill(0, [60, 61, 62], tokens_hash_seed=b"ids", sample=True)
        node.run()
        if end == "close":
            node.scheduler.close(Handle(0))
        # The prompt follows the last id that was read: the one drawn last is left out of this sequence.
        history = [*ids, int(node.done[first].outputs["token"]), *node.ids[one][:-1], 60, 61, 62]
        assert node.memory.prefixes is not None
        assert ask(node, 1, [*history, 40, 41], 3) == (
            alone([*history, 40, 41], 3),
            len(history) // PAGE * PAGE,
        )


def test_a_loop_that_reads_more_than_its_ids_is_not_found_by_ids() -> None:
    ports = LoopPorts(id_port="token", states=(("x", "x_out"),))
    node, ids = FakeNode(loop=ports), list(range(4))
    node.open(0, 90)
    first = node.prefill(0, ids, tokens_hash_seed=b"ids")
    spec = LoopSpec(max_iters=14, carry={"token": "token", "x_out": "x"}, stop_port="token")
    loop = node.submit(0, loop=spec, inputs={"x": torch.ones(2)}, outputs=("token", "x_out"), tokens_hash_seed=b"ids")
    node.run()
    node.scheduler.close(Handle(0))
    node.open(1, 90)
    spoken = [int(node.done[first].outputs["token"]), *node.ids[loop]]
    again = node.prefill(1, [*ids, *spoken], tokens_hash_seed=b"ids")
    node.run()
    assert node.done[again].cached_tokens == len(ids) // PAGE * PAGE


def test_tokens_that_are_dropped_with_their_loop_stay_out_of_the_keys() -> None:
    node, ids = FakeNode(), list(range(6))
    node.open(0, 90)
    node.prefill(0, ids, tokens_hash_seed=b"ids")
    loop = LoopSpec(max_iters=3, carry={"x_out": "x"}, fused=True)
    attend = Attend(mask="full", tokens=2, keep="loop")
    node.submit(0, loop=loop, attend=attend, inputs={"x": torch.ones(2)}, outputs=("x_out",), sample=False)
    answer = node.decode(0, 8, tokens_hash_seed=b"ids")
    node.run()
    node.scheduler.close(Handle(0))
    history = [*ids, alone(ids, 1)[0], *node.ids[answer]]
    assert node.ids[answer] == alone(ids, 8)[1:]
    assert ask(node, 1, [*history, 40], 3) == (alone([*history, 40], 3), (len(history) - 1) // PAGE * PAGE)


def test_two_equal_media_in_a_row_are_not_one_of_twice_the_length() -> None:
    def keys(*parts: int) -> list[bytes]:
        chain = ContentChain(4)
        for count in parts:
            chain.extend(np.full(count, -1, dtype=np.int32), b"image", continues=False)
        return chain.keys

    assert keys(3, 5)[0] != keys(8)[0] and keys(4, 4) == keys(8)


TURN = st.tuples(
    st.integers(0, 2),  # conversation
    st.integers(1, 7),  # new ids
    st.integers(1, 9),  # ids to generate
    st.sampled_from(["ends", "cancelled", "truncated", "forgotten"]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(TURN, min_size=2, max_size=9), st.sampled_from([14, 20, 64]), st.sampled_from([0, 1]))
def test_random_conversations_draw_the_ids_of_one_without_a_cache(
    turns: list[tuple[int, int, int, str]], pages: int, lookahead: int
) -> None:
    nodes = [FakeNode(pages=pages, lookahead=lookahead, budget=6, prefix_cache=cached) for cached in (True, False)]
    histories: dict[int, list[int]] = {}
    for handle, (talk, new, steps, end) in enumerate(turns):
        history = histories.setdefault(talk, [])[: 40 - new]
        ids = [*history, *((7 * handle + 3 * place + talk) % VOCAB for place in range(new))]
        got = []
        for node in nodes:
            node.open(handle, 52)
            node.open(1000 + handle, 30)
            first, loop = (
                node.prefill(handle, ids, tokens_hash_seed=b"ids"),
                node.decode(handle, steps, tokens_hash_seed=b"ids"),
            )
            other = node.prefill(1000 + handle, ids[::-1][:12], tokens_hash_seed=b"ids")
            beside = node.decode(1000 + handle, 8, tokens_hash_seed=b"ids")
            if end == "cancelled":
                decode_until(node, loop, steps // 2)
                node.scheduler.close(Handle(handle))
            node.run()
            assert not node.failed
            got.append(
                (
                    [int(node.done[key].outputs["token"]) for key in (first, other) if key in node.done],
                    node.ids.get(loop, [])[: steps // 2 if end == "cancelled" else None],
                    node.ids[beside],
                )
            )
            for each in (handle, 1000 + handle):
                node.scheduler.close(Handle(each))
            assert node.memory.use().pages_used == 0 and node.memory.use().slots_used == 0
        assert got[0] == got[1]
        firsts, drawn, _ = got[0]
        answer = [firsts[0], *drawn] if len(firsts) == 2 else []
        kept = {"truncated": len(answer) // 2, "forgotten": 0}.get(end, len(answer))
        histories[talk] = [*ids, *answer[:kept]] if end != "forgotten" else []


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_model_answers_the_same_from_cached_answers(lookahead: int) -> None:
    engine, history = make_engine(lookahead=lookahead, num_pages=128), prompt(1, 9)
    for turn in range(4):
        driver = Driver(engine, lookahead, keys=100 * turn)
        driver.open(turn, max_tokens=90)
        first = driver.prefill(turn, history, tokens_hash_seed=b"ids")
        loop = driver.decode(turn, 8, tokens_hash_seed=b"ids")
        driver.run()
        answer = [int(driver.done[first].outputs["token"]), *driver.ids[loop]]
        assert answer == reference(history, 8)
        assert driver.done[first].cached_tokens == (0 if not turn else (len(history) - 6) // 4 * 4)
        history = [*history, *answer, *prompt(10 + turn, 5)]
        engine.close(Handle(turn))
    assert engine.memory().pages_used == 0
