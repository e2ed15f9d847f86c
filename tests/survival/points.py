"""Points of requests at which the kill sweep strikes: one for each phase of each family, and all of a recording."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tests.survival.strikes import Sent, Side, Strike

WORKER: Final = "worker-0"
FOLLOWER: Final = "follower-1"
VICTIMS: Final = (WORKER, "conductor", "api")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A message of a request. request: its name among those of the family. The others are those of a `Strike`."""

    request: str
    sender: str
    message: str
    part: str = ""
    count: int = 1
    side: Side = "after"
    delay_s: float = 0.0

    def strike(self, victim: str) -> Strike:
        """Return the strike at this point."""
        return Strike(
            victim=victim,
            sender=self.sender,
            message=self.message,
            part=self.part,
            count=self.count,
            side=self.side,
            delay_s=self.delay_s,
        )


def media(request: str) -> Point:
    """Return the point at which the api has read the inputs and no other process knows the request."""
    return Point(request=request, sender="api", message="NewRequest", side="before")


def walk(request: str, count: int) -> Point:
    """Return the point at which a worker has run its `count`-th walk and the conductor does not know it."""
    return Point(request=request, sender=WORKER, message="WalkDone", count=count, side="before")


def output(request: str, count: int, part: str = "", side: Side = "after") -> Point:
    """Return the point before or after a worker sends its `count`-th output, of any port or of `part`."""
    return Point(request=request, sender=WORKER, message="Outputs", part=part, count=count, side=side)


def planned(request: str, name: str) -> Point:
    """Return the point at which the conductor has chosen a worker for the walk `name`, and no worker knows it."""
    return Point(request=request, sender="conductor", message="RunWalks", part=name, side="before")


def started(request: str, name: str, delay_s: float = 0.0) -> Point:
    """Return the point at which a worker has had the walk `name` for `delay_s` seconds."""
    return Point(request=request, sender="conductor", message="RunWalks", part=name, delay_s=delay_s)


def end(request: str) -> Point:
    """Return the point at which a request is complete and the api does not know it."""
    return Point(request=request, sender="conductor", message="RequestFinished", side="before")


SPEECH: Final = {
    "media": media("speech"),
    "prefill": started("speech", "prefill"),
    "decode": output("speech", 1, side="before"),
    "codec": output("speech", 7),
    "end": end("speech"),
}
PHASES: Final[dict[str, dict[str, Point]]] = {
    "orpheus": SPEECH,
    "orpheus_tp2": SPEECH,
    "qwen3_omni": {
        "media": media("clip"),
        "encode": walk("clip", 2),
        "prefill": walk("spoken", 3),
        "decode": output("sound", 7),
        "talk": started("spoken", "talker_decode", 0.02),
        "codec": output("spoken", 1, "pcm"),
        "end": end("spoken"),
    },
    "bagel": {
        "media": media("describe"),
        "encode": walk("edit", 2),
        "prefill": walk("draw", 1),
        "decode": output("describe", 2),
        "flow": output("edit", 20, "progress"),
        "image": output("draw", 2, "image"),
        "end": end("draw"),
    },
    "pi05": {
        "media": media("act"),
        "encode": started("act", "prefill"),
        "prefill": walk("act", 1),
        "flow": output("act", 1, side="before"),
        "end": output("act", 1),
    },
    "vjepa2_ac": {
        "media": media("encode"),
        "encode": started("encode", "encode"),
        "rollout": output("rollout", 1, "next_state"),
        "plan": started("plan", "plan", 0.05),
        "end": output("plan", 1),
    },
}
"""Family -> phase -> a point in it; the whole sweep strikes at all points of a recording."""


def points_of(request: str, sent: Sequence[Sent]) -> Iterator[Point]:
    """Yield a point before and one after each message about a request, and each output of it."""
    counts: Counter[tuple[str, str]] = Counter()
    for message in sent:
        if message.message not in ABOUT_REQUESTS:
            continue
        key = (message.sender, message.message)
        counts[key] += len(message.parts) if message.message == "Outputs" else 1
        for side in SIDES:
            yield Point(request=request, sender=key[0], message=key[1], count=counts[key], side=side)


SIDES: Final[tuple[Side, ...]] = ("before", "after")
ABOUT_REQUESTS: Final = (
    "NewRequest",
    "RunWalks",
    "EndStream",
    "RequestFinished",
    "CloseRequest",
    "Outputs",
    "WalkDone",
)
