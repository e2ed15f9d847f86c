"""Sessions of clients: conversations whose next request costs only what is new. Owned by the service.

A session keeps the ids of the answers that it was given, so that a later request which contains their text has exactly
these ids in its prompt, and finds their cached pages. After a restart of the api the text is tokenized as any other.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from mstar_core.api.requests.session_media import SessionMedia
from mstar_core.errors import NotFound
from mstar_core.plugin.chat.turns import Turn
from mstar_core.plugin.processor import Detokenizer

MOST_IDS: Final = 32768
"""Most ids of answers that a session keeps; the oldest answers are forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of sessions. idle_s: after its last request; ttl_s: after its first; most: sessions at once.

    media_bytes: decoded images of all sessions.
    """

    idle_s: float
    ttl_s: float
    most: int
    media_bytes: int = 0


class AnswerRecord:
    """A detokenizer that keeps the ids and the text of one answer."""

    def __init__(self, inner: Detokenizer) -> None:
        self.ids = array("q")
        self._inner = inner
        self._texts: list[str] = []

    def push(self, ids: Sequence[int]) -> str:
        """See Detokenizer."""
        self.ids.extend(ids)
        return self._kept(self._inner.push(ids))

    def flush(self) -> str:
        """See Detokenizer."""
        return self._kept(self._inner.flush())

    @property
    def text(self) -> str:
        """Its text so far."""
        return "".join(self._texts)

    def _kept(self, text: str) -> str:
        self._texts.append(text)
        return text


@dataclass(slots=True, kw_only=True)
class ClientSession:
    """One session. id: of the client. name: of the session in the runtime. lease_s: see `NewRequest`.

    requests: all so far; running: those that run. used: end of the last one, on the clock of the sessions.
    """

    id: str
    name: str
    began: float
    used: float
    lease_s: float = 0.0
    requests: int = 0
    running: int = 0
    _answers: OrderedDict[str, array[int]] = field(default_factory=OrderedDict)
    _size: int = 0

    def remember(self, answer: AnswerRecord) -> None:
        """Keep the ids of a whole answer."""
        text = answer.text
        if not text or len(answer.ids) > MOST_IDS:
            return
        self._size += len(answer.ids) - len(self._answers.pop(text, ()))
        self._answers[text] = answer.ids
        while self._size > MOST_IDS:
            _, oldest = self._answers.popitem(last=False)
            self._size -= len(oldest)

    def with_known_ids(self, turns: Sequence[Turn], texts: Sequence[str]) -> tuple[Turn, ...]:
        """Return turns with the ids of those answers that are kept. texts: see `PromptRequest`."""
        return tuple(self._with_ids(turn, texts) for turn in turns)

    def _with_ids(self, turn: Turn, texts: Sequence[str]) -> Turn:
        if turn.role != "assistant" or turn.calls or any(kind != "text" for kind, _ in turn.order):
            return turn
        ids = self._answers.get("".join(texts[index] for _, index in turn.order))
        return turn if ids is None else replace(turn, ids=tuple(ids))


class Sessions:
    """All sessions, the one that was idle for longest first. They end when their limits are over, or on request."""

    def __init__(self, limits: SessionLimits, clock: Callable[[], float], on_end: Callable[[str], None]) -> None:
        """on_end: called with the name of a session that is deleted or dropped; one that expired holds no lease."""
        self._limits = limits
        self._clock = clock
        self._on_end = on_end
        self._sessions: OrderedDict[str, ClientSession] = OrderedDict()
        self.media = SessionMedia(limits.media_bytes, self._sessions.__contains__)

    def __len__(self) -> int:
        self._expire()
        return len(self._sessions)

    def find(self, name: str) -> ClientSession | None:
        """Return a session by its name in the runtime, None if it has ended."""
        return self._sessions.get(name)

    def newest(self) -> Iterator[ClientSession]:
        """Yield the sessions, the one with the latest request first."""
        return reversed(self._sessions.values())

    @contextmanager
    def request(self, key: str, session_id: str) -> Iterator[ClientSession | None]:
        """Return the session of a request for its duration, begun if it is new; None without an id.

        key: digest of the API key, whose sessions are apart from those of others.
        """
        if not session_id:
            yield None
            return
        session = self._opened(session_id, name_of(key, session_id))
        session.requests += 1
        session.running += 1
        try:
            yield session
        finally:
            session.running -= 1
            session.used = self._clock()
            if self._sessions.get(session.name) is session:
                self._sessions.move_to_end(session.name)

    def delete(self, key: str, session_id: str) -> None:
        """End a session. Its running requests go on. Raises NotFound."""
        self._expire()
        name = name_of(key, session_id)
        if name not in self._sessions:
            raise NotFound(
                f"the session {session_id!r} does not exist",
                hint="it may have ended after its idle time",
                field="session_id",
                code="session_not_found",
            )
        self._forget(name)
        self._on_end(name)

    def _opened(self, session_id: str, name: str) -> ClientSession:
        self._expire()
        now = self._clock()
        if name in self._sessions and self._is_over(self._sessions[name], now):
            self._forget(name)
        session = self._sessions.setdefault(name, ClientSession(id=session_id, name=name, began=now, used=now))
        self._sessions.move_to_end(name)
        session.lease_s = min(self._limits.idle_s, max(1.0, session.began + self._limits.ttl_s - now))
        while len(self._sessions) > self._limits.most:
            dropped = next(iter(self._sessions))
            self._forget(dropped)
            self._on_end(dropped)
        return session

    def _expire(self) -> None:
        """Forget the sessions whose limits are over, up to the first that is not: each request calls this."""
        now = self._clock()
        while self._sessions:
            name, session = next(iter(self._sessions.items()))
            if not self._is_over(session, now):
                return
            self._forget(name)

    def _forget(self, name: str) -> None:
        del self._sessions[name]
        self.media.end(name)

    def _is_over(self, session: ClientSession, now: float) -> bool:
        is_idle = not session.running and now - session.used >= self._limits.idle_s
        return is_idle or now - session.began >= self._limits.ttl_s


def name_of(key: str, session_id: str) -> str:
    """Return the name of a session in the runtime. key: digest of the API key, empty without keys."""
    return f"{key}/{session_id}" if key else session_id
