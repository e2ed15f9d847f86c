"""Lookup of the deployment that knows a request, for `trace`, `cancel` and `describe request/ID`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from mstar_core.errors import NotFound, Unreachable, UsageError
from mstar_core.host.run_dir import deployments
from mstarctl.client.admin import AdminClient
from mstarctl.client.reach import Reached, context_of, reached
from mstarctl.output.options import GlobalOptions


@contextmanager
def holder_of(options: GlobalOptions, request_id: str, deployment: str | None) -> Iterator[Reached]:
    """Connect to the deployment that knows the request. Raises NotFound, and UsageError if several know it."""
    is_here = options.socket is None and context_of(options).is_local
    live = [run for run in deployments() if run.holder() is not None] if is_here else []
    if deployment is None and len(live) > 1:
        knowing = [run.name for run in live if _knows(AdminClient.of(run), request_id)]
        if len(knowing) > 1:
            raise UsageError(
                f"{len(knowing)} deployments know the request {request_id!r}",
                hint=f"add --deployment, one of: {', '.join(knowing)}",
            )
        if not knowing:
            raise NotFound(
                f"no deployment knows the request {request_id!r}",
                f"searched {', '.join(run.name for run in live)}",
                "mstarctl requests NAME",
                kind="request",
                name=request_id,
            )
        deployment = knowing[0]
    with reached(options, deployment) as holder:
        yield holder


def request_path(request_id: str, *words: str) -> str:
    """Return the path of a request on the admin socket. Ids may contain any printable character."""
    return "/".join(("/v1/requests", quote(request_id, safe=""), *words))


def _knows(admin: AdminClient, request_id: str) -> bool:
    try:
        answer: dict[str, Any] = admin.get(request_path(request_id))
    except (NotFound, Unreachable):
        return False
    return bool(answer)
