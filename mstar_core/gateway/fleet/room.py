"""Rules by which a model gets memory: which devices are short, which deployment makes room, and the refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mstar_core.errors import Unavailable
from mstar_core.gateway.fleet.hosting import Need
from mstar_core.gateway.fleet.managed_model import TURN_S, ManagedModel, Member
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


def choose_victims(
    models: Sequence[ManagedModel], short: Sequence[Shortage], wanted: ManagedModel, now: float, *, is_late: bool
) -> list[Victim]:
    """Return the deployments that make room now, none if it is better to wait.

    Of the deployments that hold memory of a device that is short, no more than suffice give theirs, those of the least
    worth first: free ones go to sleep; sleeping ones end if that frees enough; else models in use are waited for, and
    none sleeps beside them in vain. Pinned models are never chosen. is_late: choose also models in use, whose requests
    finish first, if they have had their turn since they were loaded or woken.
    """
    holding = {holder.name for each in short for holder in each.holders if holder.held_bytes != 0}
    others = [(model, m) for model in models if model is not wanted for m in model.members if m.name in holding]
    coming = [member for model, member in others if member.is_moving]
    awake = sorted(
        (_victim(model, member) for model, member in others if member.is_awake and not model.is_pinned),
        key=lambda each: each.member.worth(now),
    )
    awake = [each for each in awake if each.member.is_own or not each.is_ended]
    free = [each for each in awake if each.member.is_free(now)]
    ends = [
        Victim(model=model, member=member, is_ended=True)
        for model, member in others
        if member.state is ModelState.SLEEPING and member.is_own and not member.is_moving
    ]
    ends.sort(key=lambda each: each.member.last_used)
    chosen = fewest(free, short, coming)
    if chosen is None:
        chosen = fewest([*free, *ends], short, coming)
    if chosen is None:
        all_awake = [*free, *(each for each in awake if each not in free)]
        chosen = fewest(all_awake, short, coming)
        if chosen is None:  # only with the rests of sleeping ones, or with one that is loading
            chosen = all_awake[:1]
    return [
        each
        for each in chosen
        if not each.member.is_awake or each.member.is_free(now) or is_late and now - each.member.woken_at >= TURN_S
    ]


def _victim(model: ManagedModel, member: Member) -> Victim:
    return Victim(model=model, member=member, is_ended=model.ends(member))


def fewest(candidates: Sequence[Victim], short: Sequence[Shortage], coming: Sequence[Member]) -> list[Victim] | None:
    """Return the candidates without those that are not needed, the last ones first, None if all do not suffice.

    coming: give their memory by themselves.
    """
    if not _suffices(candidates, short, coming):
        return None
    kept = list(candidates)
    for each in reversed(candidates):
        rest = [one for one in kept if one is not each]
        kept = rest if _suffices(rest, short, coming) else kept
    return kept


def _suffices(victims: Sequence[Victim], short: Sequence[Shortage], coming: Sequence[Member]) -> bool:
    rests = {each.member.name: {} if each.is_ended else each.member.rest for each in victims}
    rests |= {member.name: member.rest for member in coming}
    for each in short:
        given = sum(
            (each.total_bytes if holder.held_bytes is None else holder.held_bytes) - rests[holder.name].get(each.key, 0)
            for holder in each.holders
            if holder.name in rests
        )
        if given < each.short_bytes:
            return False
    return True


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
        or (not model.is_pinned and member.is_awake and (may_wait or member.is_free(now)))
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
