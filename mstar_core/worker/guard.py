"""The isolation boundary around the work of one request: what goes wrong inside fails it and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from mstar_core.errors import MstarError

if TYPE_CHECKING:
    from mstar_core.worker.request import WorkerRequest

log = logging.getLogger(__name__)


class Guard:
    """A context manager; `fail` is called with the request and the error."""

    __slots__ = ("_fail", "_request")

    def __init__(self, fail: Callable[[WorkerRequest, BaseException], None], request: WorkerRequest) -> None:
        self._fail = fail
        self._request = request

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        if not isinstance(error, MstarError):
            log.error("request %d failed", self._request.handle, exc_info=error)
        self._fail(self._request, error)
        return True
