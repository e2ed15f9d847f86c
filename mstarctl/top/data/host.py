"""Deployments and resources of one host, for the list from which `top` is started. Read in a thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mstar_core.host.other_hosts.contexts import Context
from mstar_core.host.run_dir import deployments
from mstarctl.client.deployments import known
from mstarctl.client.tunnel import remote_items
from mstarctl.objects.host import HostFacts, read_host


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDeployment:
    """One running deployment. facts: figures by their names on the admin socket."""

    name: str
    state: str
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """A host at one moment. host: None if only its deployments are known."""

    deployments: tuple[HostDeployment, ...]
    host: HostFacts | None = None


ReadHost = Callable[[], HostView]


def here() -> HostView:
    """Return the running deployments and the resources of this host."""
    held = [known(run) for run in deployments() if run.holder() is not None]
    running = [HostDeployment(name=item.name, state=item.state, facts=item.head) for item in held]
    return HostView(deployments=tuple(sorted(running, key=lambda item: item.name)), host=read_host())


def there(context: Context) -> HostView:
    """Return the running deployments of another host. Raises Unreachable."""
    items = [item for item in remote_items(context) if item.get("pid") is not None]
    remote = [HostDeployment(name=str(item["name"]), state=str(item["state"]), facts=item) for item in items]
    return HostView(deployments=tuple(remote))
