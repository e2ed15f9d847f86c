"""Rules by which a model gets memory: which devices are short, which deployment makes room, and the refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mstar_core.errors import Unavailable
from mstar_core.gateway.fleet.hosting import Need
from mstar_core.gateway.fleet.managed_model import ManagedModel, Member
from mstar_core.gateway.parts import ModelState
from mstar_core.host.gpu_locks import Holder, device_text, gib

Holders = Callable[[str], Sequence[Holder]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """A device without enough memory. holders: without the deployment that wants it. short_bytes: what is missing."""

    key: str
    device: str
    need_bytes: int
    total_bytes: int
    short_bytes: int
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Most bytes of each device that deployments of this gateway hold together. names: those deployments."""

    most_bytes: int
    names: frozenset[str]


def shortages(need: Need, holders: Holders, name: str, limit: Limit | None = None) -> list[Shortage]:
    """Return the devices that lack memory for a deployment called `name`, which may hold a share already."""
    found = []
    for key, claim in sorted(need.claims.items()):
        others = tuple(each for each in holders(key) if each.name != name)
        short = _held_bytes(others, claim.total_bytes) + claim.need_bytes - claim.total_bytes
        if limit is not None:
            ours = [each for each in others if each.name in limit.names]
            short = max(short, _held_bytes(ours, claim.total_bytes) + claim.need_bytes - limit.most_bytes)
        if not need.is_shared and others:
            short = max(short, 1)
        if short > 0:
            found.append(
                Shortage(
                    key=key,
                    device=claim.device,
                    need_bytes=claim.need_bytes,
                    total_bytes=claim.total_bytes,
                    short_bytes=short,
                    holders=others,
                )
            )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A deployment that makes room. is_ended: it ends, because its sleep gives nothing back."""

    model: ManagedModel
    member: Member
    is_ended: bool


def choose_victim(
    models: Sequence[ManagedModel], short: Sequence[Shortage], wanted: ManagedModel, now: float, *, turn_s: float | None
) -> Victim | None:
    """Return the deployment that makes room: the least recently used one that holds memory of a device that is short.

    Deployments that are idle go to sleep first; sleeping ones end if that frees enough. Pinned models and
    deployments in use are never chosen. turn_s: choose one in use, whose requests finish first, if it has served for so
    long since it was loaded or woken; None: choose none in use.
    """
    holding = {holder.name for each in short for holder in each.holders if holder.held_bytes != 0}
    chosen: list[tuple[tuple[int, float], Victim]] = []
    for model in models:
        for member in model.members:
            if member.name not in holding or member.is_moving or model is wanted:
                continue
            has_served = turn_s is not None and now - member.woken_at >= turn_s
            if member.is_awake and not model.is_pinned and (has_served or not member.is_busy(now)):
                is_ended = model.ends(member)
                if is_ended and not member.is_own:
                    continue
                chosen.append(((0, member.last_used), Victim(model=model, member=member, is_ended=is_ended)))
            elif member.state is ModelState.SLEEPING and member.is_own:
                chosen.append(((1, member.last_used), Victim(model=model, member=member, is_ended=True)))
    if not chosen:
        return None
    victim = min(chosen, key=lambda pair: pair[0])[1]
    is_asleep = victim.member.state is ModelState.SLEEPING
    if is_asleep and not can_suffice(models, short, wanted, now, may_wait=False):
        return None  # its rest does not suffice: a model that becomes idle makes room instead
    return victim


def can_suffice(
    models: Iterable[ManagedModel], short: Sequence[Shortage], wanted: ManagedModel, now: float, *, may_wait: bool
) -> bool:
    """Return whether other models can give each device the bytes that it lacks, so that none sleeps in vain.

    may_wait: models in use count too, because their requests end.
    """
    givers = {
        member.name
        for model in models
        if model is not wanted
        for member in model.members
        if member.is_moving
        or (member.state is ModelState.SLEEPING and member.is_own)
        or (not model.is_pinned and member.is_awake and (may_wait or not member.is_busy(now)))
        or (not model.is_pinned and member.state is ModelState.LOADING and may_wait)
    }
    return all(
        _held_bytes((h for h in each.holders if h.name in givers), each.total_bytes) >= each.short_bytes
        for each in short
    )


def refusal(name: str, short: Sequence[Shortage], retry_after_s: float) -> Unavailable:
    """Return the refusal of a model for which no room can be made: the holders, their bytes, and what is missing."""
    parts = []
    for each in short:
        held = ", ".join(f"{h.name or 'another deployment'} holds {_held(h)}" for h in each.holders)
        parts.append(
            f"{device_text(each.device)}: {gib(each.need_bytes)} of {gib(each.total_bytes)} needed, {held}: "
            f"{each.short_bytes:,} bytes too few"
        )
    holders = list(dict.fromkeys(h.name for each in short for h in each.holders if h.name))
    return Unavailable(
        f"no memory is free for {name}; {', '.join(holders) or 'another deployment'} holds it",
        "; ".join(parts),
        "retry later",
        code="no_memory",
        retry_after_s=retry_after_s,
        holders=holders,
    )


def held_by_device(needs: Mapping[str, str], holders: Holders, names: Sequence[str]) -> dict[str, int]:
    """Return the bytes that deployments hold, by device. needs: key -> device."""
    held: dict[str, int] = {}
    for key, device in needs.items():
        mine = [each for each in holders(key) if each.name in names]
        if mine:
            held[device] = sum(each.held_bytes or 0 for each in mine)
    return held


def _held_bytes(holders: Iterable[Holder], total_bytes: int) -> int:
    return sum(total_bytes if each.held_bytes is None else each.held_bytes for each in holders)


def _held(holder: Holder) -> str:
    return "all of it" if holder.held_bytes is None else gib(holder.held_bytes)
