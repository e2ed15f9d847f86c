"""Sessions: `session_id` of requests, their limits, the ids of their answers, and their end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from mstar_core.api.requests.sessions import MOST_IDS, AnswerRecord, ClientSession, SessionLimits, Sessions
from mstar_core.errors import NotFound
from mstar_core.messages.requests import EndSession
from mstar_core.plugin.chat.turns import Turn, generated_ids
from tests.api.conftest import Started
from tests.fakes.token_model import SPEC, serve

CHAT = "/v1/chat/completions"


@dataclass
class World:
    """Sessions with a clock that a test sets. ended: names that were reported."""

    now: float = 100.0
    ended: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = SessionLimits(idle_s=10.0, ttl_s=50.0, most=3)
        self.sessions = Sessions(limits, lambda: self.now, self.ended.append)

    def ask(self, session_id: str, key: str = "") -> ClientSession:
        with self.sessions.request(key, session_id) as session:
            assert session is not None
            return session


class Words:
    """A detokenizer of one word per id, which holds back the last one."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, ids: Sequence[int]) -> str:
        text, self._held = self._held, "".join(f"w{value} " for value in ids)
        return text

    def flush(self) -> str:
        return self._held


def answer(*ids: int) -> AnswerRecord:
    record = AnswerRecord(Words())
    for value in ids:
        record.push([value])
    record.flush()
    return record


def known(session: ClientSession, *texts: str) -> list[list[int]]:
    """Return the known ids of a conversation in which every second text is an answer."""
    roles = ("user", "assistant")
    turns = [Turn(role=roles[number % 2], order=(("text", number),)) for number in range(len(texts))]  # type: ignore[arg-type]
    return [list(turn.ids) for turn in session.with_known_ids(turns, texts)]


def test_a_session_ends_after_its_idle_time_but_not_while_a_request_runs() -> None:
    world = World()
    with world.sessions.request("", "a"):
        world.now += 30
        assert len(world.sessions) == 1
    world.now += 9
    first = world.ask("a")
    world.now += 10
    assert len(world.sessions) == 0 and world.ended == []
    assert world.ask("a") is not first, "the id begins another session"


def test_a_session_ends_after_its_absolute_time_and_leases_no_longer_than_that() -> None:
    world = World()
    leases = []
    for _ in range(6):
        leases.append(world.ask("a").lease_s)
        world.now += 9
    assert leases == [10, 10, 10, 10, 10, 5]
    assert len(world.sessions) == 0


def test_the_session_that_was_idle_for_longest_makes_room() -> None:
    world = World()
    for name in ("a", "b", "c", "a", "d"):
        world.ask(name)
    assert world.ended == ["b"] and len(world.sessions) == 3


def test_sessions_of_keys_are_apart_and_end_once() -> None:
    world = World()
    mine, other = world.ask("a", "key1"), world.ask("a", "key2")
    assert mine is not other and mine.name != other.name
    world.sessions.delete("key1", "a")
    with pytest.raises(NotFound) as caught:
        world.sessions.delete("key1", "a")
    assert (caught.value.code, caught.value.status) == ("session_not_found", 404)
    assert world.ended == [mine.name] and len(world.sessions) == 1
    with world.sessions.request("key1", "") as nothing:
        assert nothing is None


def test_turns_with_an_answer_of_the_session_have_its_ids() -> None:
    session = World().ask("a")
    session.remember(answer(1, 2, 3))
    found = known(session, "hi", "w1 w2 w3 ", "more", "w1 w2", "w1 w2 w3 ")
    assert found == [[], [1, 2, 3], [], [], []], "neither a part nor a user's text"


def test_old_answers_are_forgotten_beyond_the_limit() -> None:
    session, size = World().ask("a"), MOST_IDS // 2
    for first in (1, 2, 1, 3):
        session.remember(answer(*range(first, first + size)))
    texts = ["".join(f"w{value} " for value in range(first, first + size)) for first in (1, 2, 3)]
    found = known(session, "u", texts[0], "u", texts[1], "u", texts[2])
    assert [bool(ids) for ids in found[1::2]] == [True, False, True]
    session.remember(answer(*range(MOST_IDS + 1)))
    assert known(session, "u", texts[0])[1] == found[1], "too long an answer is not kept"


@pytest.mark.parametrize(
    ("ids", "wanted"), [((1, 2, 9), [1, 2]), ((1, 2, 9, 8), [1, 2]), ((1, 9, 2), []), ((9,), []), ((), [])]
)
def test_ids_that_ended_an_answer_are_left_out_and_control_tokens_inside_are_not_used(
    ids: tuple[int, ...], wanted: list[int]
) -> None:
    assert generated_ids(Turn(role="assistant", ids=ids), {8, 9}) == wanted


async def test_a_request_names_its_session_to_the_runtime_until_it_is_deleted(started: Started) -> None:
    async with started(serve, model=SPEC, sessions_idle_s=30.0) as api:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "session_id": "talk-1"}
        for path, sent in ((CHAT, body), ("/generate", {"text": "hi", "streaming": False, "session_id": "talk-1"})):
            response = await api.client.post(path, json=sent)
            assert response.status_code == 200, response.text
        assert [(request.session, request.lease_s) for request in api.fake.requests] == [("talk-1", 30.0)] * 2
        assert "mstar_sessions 1.0" in (await api.client.get("/metrics")).text
        gone = await api.client.delete("/v1/sessions/talk-1")
        assert (gone.status_code, gone.json()) == (200, {"id": "talk-1", "deleted": True, "object": "session"})
        await api.fake.until(lambda: api.fake.of(EndSession) == [EndSession(session="talk-1")])
        again = await api.client.delete("/v1/sessions/talk-1")
        assert (again.status_code, again.json()["error"]["code"]) == (404, "session_not_found")
        assert "mstar_sessions 0.0" in (await api.client.get("/metrics")).text
        await api.clean()


async def test_limits_of_the_deployment_reach_the_sessions(started: Started) -> None:
    limits = {"sessions_idle_s": 30.0, "sessions_ttl_s": 40.0, "sessions_max_count": 1}
    for changes, lease_s in ((limits, 30.0), ({**limits, "sessions_ttl_s": 20.0}, 20.0)):
        async with started(serve, model=SPEC, **changes) as api:
            for name in ("one", "two"):
                body = {"messages": [{"role": "user", "content": "hi"}], "session_id": name}
                assert (await api.client.post(CHAT, json=body)).status_code == 200
            assert api.fake.requests[0].lease_s == pytest.approx(lease_s, abs=0.01)
            await api.fake.until(lambda: api.fake.of(EndSession) == [EndSession(session="one")])


async def test_a_request_without_a_session_has_none(started: Started) -> None:
    async with started(serve, model=SPEC) as api:
        await api.client.post(CHAT, json={"messages": [{"role": "user", "content": "hi"}]})
        assert [(request.session, request.lease_s) for request in api.fake.requests] == [("", 0.0)]


@pytest.mark.parametrize("wrong", ["", "a b", "a/b", "x" * 129, 7, ["a"]])
async def test_a_session_id_that_is_none_is_refused(started: Started, wrong: Any) -> None:
    async with started(serve, model=SPEC) as api:
        messages = [{"role": "user", "content": "hi"}]
        for path, sent in ((CHAT, {"messages": messages}), ("/generate", {"text": "hi", "streaming": False})):
            response = await api.client.post(path, json={**sent, "session_id": wrong})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) in ((400, "session_id"), (422, "session_id")), response.text
        assert not api.fake.requests
