"""Memory of the replicas that hold what a request builds on: ids that they made, sessions, prefixes of prompts."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from mstar_core.gateway.door.headers import SECRET
from mstar_core.gateway.door.kept_ids import KeptIds, KeptOwner
from mstar_core.gateway.parts import Replica

MOST_OWNERS: Final = 65_536
MOST_PREFIXES: Final = 65_536
PREFIX_BYTES: Final = (4096, 1024, 256)
"""Lengths of a prompt's beginning that are compared, the longest first."""

SLACK: Final = 4
"""Requests by which the replica with the prefix may be busier than another one."""


@dataclass(frozen=True, slots=True)
class IdOwner:
    """The deployment that made an id. key, tenant: of the request that made it; other tenants do not see the id."""

    model: str
    deployment: str
    key: str | None
    tenant: str = ""


@dataclass(slots=True)
class Affinity:
    """Bounded memory of owners and prefixes: the least recently used are forgotten. Owned by the door.

    kept: file of the owners, which survives the worker; None without one.
    """

    kept: KeptIds | None = None
    owners: OrderedDict[str, IdOwner] = field(default_factory=OrderedDict)
    prefixes: OrderedDict[bytes, str] = field(default_factory=OrderedDict)

    def note(self, made: Iterable[str], owner: IdOwner, *, is_kept: bool = True) -> None:
        """Remember who made ids. is_kept: also over a restart; not the ids of requests, which end before long.

        A client secret is never written to a file, and neither is the key that it stands for.
        """
        for name in made:
            if is_kept and self.kept is not None and self.owners.get(name) != owner and not name.startswith(SECRET):
                self.kept.write(name, KeptOwner(owner.model, owner.deployment, owner.tenant))
            self._remember(name, owner)

    def _remember(self, name: str, owner: IdOwner) -> None:
        self.owners[name] = owner
        self.owners.move_to_end(name)
        while len(self.owners) > MOST_OWNERS:
            self.owners.popitem(last=False)

    def owner(self, name: str) -> IdOwner | None:
        """Return who made an id, None if it is not known."""
        owner = self.owners.get(name)
        if owner is not None:
            self.owners.move_to_end(name)
            return owner
        kept = None if self.kept is None or name.startswith(SECRET) else self.kept.find(name)
        if kept is None:
            return None
        found = IdOwner(kept.model, kept.deployment, None, kept.tenant)
        self._remember(name, found)
        return found

    def note_prefix(self, model: str, prompt: bytes, deployment: str) -> None:
        """Remember which replica has read a prompt."""
        for key in prefix_keys(model, prompt):
            self.prefixes[key] = deployment
            self.prefixes.move_to_end(key)
        while len(self.prefixes) > MOST_PREFIXES:
            self.prefixes.popitem(last=False)

    def with_prefix(self, model: str, prompt: bytes) -> str | None:
        """Return the deployment that has read the longest known beginning of a prompt."""
        return next((self.prefixes[key] for key in prefix_keys(model, prompt) if key in self.prefixes), None)


def prefix_keys(model: str, prompt: bytes) -> list[bytes]:
    """Return a key for each compared length that a prompt has."""
    name = model.encode()
    return [
        hashlib.blake2b(prompt[:size], digest_size=16, key=name[:64]).digest()
        for size in PREFIX_BYTES
        if len(prompt) >= size
    ]


def in_order(
    replicas: Sequence[Replica], load: Mapping[str, float], sticky: str | None, preferred: str | None
) -> list[Replica]:
    """Return replicas in the order in which they are tried.

    sticky: holds the state of the request, so it comes first. preferred: has its prefix, so it comes first unless it is
    busier than the least loaded one by more than `SLACK`. load: requests by deployment.
    """
    ordered = sorted(replicas, key=lambda replica: (load.get(replica.deployment, 0.0), replica.deployment))
    if sticky is None and preferred is not None and ordered:
        least = load.get(ordered[0].deployment, 0.0)
        sticky = preferred if load.get(preferred, 0.0) <= least + SLACK else None
    return sorted(ordered, key=lambda replica: replica.deployment != sticky)
