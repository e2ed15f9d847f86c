"""Switching of `top` between the deployments of one host, over their sockets or ssh tunnels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from mstar_core.errors import MstarError
from mstar_core.host.run_dir import deployments
from mstarctl.client.admin import AdminClient
from mstarctl.client.deployments import known
from mstarctl.client.reach import context_of, reached
from mstarctl.client.tunnel import remote_items
from mstarctl.output.options import GlobalOptions
from mstarctl.top.data.queries import DeploymentQueries
from mstarctl.top.data.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherDeployment:
    """A running deployment. load: running and waiting requests, None if unknown."""

    name: str
    state: str
    load: tuple[int, int] | None = None


class Switcher(Protocol):
    """The interface to the screen. Both methods wait for sockets or ssh, so they are called in threads."""

    def running(self) -> list[OtherDeployment]: ...

    def go(self, name: str) -> tuple[Session, DeploymentQueries]: ...


class DeploymentSwitcher:
    """Lists and opens deployments. Owned by the command. Leaving the block closes the last tunnel."""

    def __init__(self, options: GlobalOptions, open_session: Callable[[AdminClient], Session]) -> None:
        self._options, self._open_session = options, open_session
        self._open = ExitStack()

    def __enter__(self) -> DeploymentSwitcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def running(self) -> list[OtherDeployment]:
        """Return the running deployments of this host, or of the context's. Raises MstarError."""
        if self._options.socket is not None:
            raise MstarError("--socket names one deployment", hint="start top without --socket to see others")
        context = context_of(self._options)
        if context.is_local:
            running = [known(run) for run in deployments()]
            return [_other(item.name, item.state, item.head) for item in running if item.pid is not None]
        items = remote_items(context)
        return [_other(str(item["name"]), str(item["state"]), item) for item in items if item.get("pid") is not None]

    def go(self, name: str) -> tuple[Session, DeploymentQueries]:
        """Open a deployment and close the previous tunnel. Raises MstarError without closing it."""
        fresh = ExitStack()
        target = fresh.enter_context(reached(self._options, name))
        session = self._open_session(target.admin)
        self._open.close()
        self._open = fresh
        return session, DeploymentQueries(target.admin, session)


def _other(name: str, state: str, facts: dict[str, object]) -> OtherDeployment:
    running, waiting = facts.get("running"), facts.get("waiting")
    is_known = isinstance(running, int) and isinstance(waiting, int)
    return OtherDeployment(name=name, state=state, load=(int(str(running)), int(str(waiting))) if is_known else None)
