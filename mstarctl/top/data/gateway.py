"""Models of a gateway at one moment, from its admin socket. Read in a thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mstar_core.gateway.parts import TenantStanding
from mstar_core.host.other_hosts.contexts import LOCAL
from mstarctl.client import AdminClient
from mstarctl.serve.changes import places_text, progress_text


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayModel:
    """One model. held: bytes by device; totals: of those devices. reason: what requests wait for, or its failure.
    progress: of a load or wake. hosts: of its deployments, empty if all run on this host.
    """

    name: str
    state: str
    replicas: int = 0
    running: int = 0
    queued: int = 0
    wakes: int = 0
    held: Mapping[str, int] = field(default_factory=dict)
    totals: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""
    progress: str = ""
    caution: str = ""
    hosts: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayView:
    """A gateway. facts: its head. models, tenants: by name."""

    name: str
    facts: Mapping[str, Any]
    models: tuple[GatewayModel, ...]
    tenants: tuple[TenantStanding, ...] = ()

    @property
    def devices(self) -> dict[str, int]:
        """Bytes of the devices of all models."""
        return {device: total for model in self.models for device, total in sorted(model.totals.items())}


ReadGateway = Callable[[], GatewayView]


def read_gateway(admin: AdminClient) -> GatewayView:
    """Return a gateway and its models. Raises Unreachable."""
    return view_of(admin.get("/v1/snapshot"))


def view_of(snapshot: Mapping[str, Any]) -> GatewayView:
    """Return the view of a gateway's snapshot."""
    head = snapshot["deployment"]
    models = tuple(
        GatewayModel(
            name=str(item["name"]),
            state=str(item["state"]),
            replicas=len(item["replicas"]),
            running=int(item["running"]),
            queued=int(item["queued"]),
            wakes=int(item["wakes"]),
            held=item["held"],
            totals=item.get("totals", {}),
            reason=str(item["reason"]),
            progress=progress_text(item),
            caution=str(item.get("caution") or ""),
            hosts=_hosts(item.get("places", ())),
        )
        for item in snapshot["models"]
    )
    tenants = tuple(msgspec.convert(item, type=TenantStanding) for item in snapshot.get("tenants", ()))
    return GatewayView(name=str(head["name"]), facts=head, models=models, tenants=tenants)


def _hosts(places: Sequence[Mapping[str, Any]]) -> str:
    return places_text(places) if any(each["host"] != LOCAL for each in places) else ""
