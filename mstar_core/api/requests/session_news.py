"""State of all sessions for the supervisor: realtime sessions, and those of requests with a `session_id`."""

from __future__ import annotations

from typing import Final

import msgspec

from mstar_core.api.requests.open_sessions import OpenSessions
from mstar_core.api.requests.sessions import ClientSession, Sessions, name_of
from mstar_core.messages.telemetry import SessionNews

MOST: Final = 200
"""Most sessions that are reported: the realtime ones first, then those with the latest requests."""

CHAT: Final = "chat"


def session_news(realtime: OpenSessions, clients: Sessions) -> list[SessionNews]:
    """Return the sessions. A realtime session has the lease of the client session that its responses belong to."""
    names = {name_of(session.key, session.id): session for session in realtime}
    news = [_leased(session.news(), clients.find(name)) for name, session in names.items()]
    for client in clients.newest():
        if len(news) >= MOST:
            break
        if client.name not in names:
            news.append(_chat(client))
    return news[:MOST]


def _leased(news: SessionNews, client: ClientSession | None) -> SessionNews:
    if client is None:
        return news
    return msgspec.structs.replace(news, running=client.running, used=client.used, lease_s=client.lease_s)


def _chat(client: ClientSession) -> SessionNews:
    return SessionNews(
        id=client.id,
        kind=CHAT,
        speaks="model" if client.running else "silence",
        began=client.began,
        answers=client.requests,
        running=client.running,
        used=client.used,
        lease_s=client.lease_s,
    )
