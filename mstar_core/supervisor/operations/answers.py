"""Answers of children to numbered orders of the supervisor, such as the load of an adapter. Owned by the supervisor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from mstar_core.messages.wire import Message
from mstar_core.supervisor.operations.changes import Changes

if TYPE_CHECKING:
    from mstar_core.supervisor.child import Child


class Numbered(Protocol):
    """An answer. number: of the order."""

    @property
    def number(self) -> int: ...


A = TypeVar("A", bound=Numbered)


class OrderedDeployment(Protocol):
    """The parts of the supervisor that orders need."""

    children: dict[str, Child]
    changes: Changes


class Answers(Generic[A]):
    """Sends orders to children and collects one answer of each. send: a message to a child."""

    def __init__(self, deployment: OrderedDeployment, send: Callable[[str, Message], object]) -> None:
        self._deployment = deployment
        self._send = send
        self._answers: dict[tuple[str, int], A] = {}

    def take(self, child: str, answer: A) -> None:
        """Take the answer of a child."""
        self._answers[child, answer.number] = answer
        self._deployment.changes.notify()

    async def ask(
        self, names: Iterable[str], message: Message, number: int, limit_s: float | None = None
    ) -> dict[str, A | None] | None:
        """Send an order to children and return their answers, None of one that has died, once all have answered.

        Returns None if some have not after `limit_s`.
        """
        deployment, asked = self._deployment, list(names)
        lives = {name: deployment.children[name].incarnation for name in asked}
        for name in asked:
            self._answers.pop((name, number), None)
            self._send(name, message)

        def has_died(name: str) -> bool:
            child = deployment.children.get(name)
            return child is None or child.incarnation != lives[name] or not child.is_running

        def is_over() -> bool:
            return all((name, number) in self._answers or has_died(name) for name in asked)

        is_in_time = await deployment.changes.until(is_over, limit_s)
        answers = {name: self._answers.pop((name, number), None) for name in asked}
        return answers if is_in_time else None
