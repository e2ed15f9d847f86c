"""Place of a process in its tensor-parallel group, from the deployment spec and the arguments of the process.

Used by the mains of leaders and followers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from mstar_core.errors import ConfigError
from mstar_core.parallel.groups import JOIN_S, GroupPlace
from mstar_core.parallel.meeting import Meeting
from mstar_core.transport.curve import KEYS_FILE, read_keys

if TYPE_CHECKING:
    from mstar_core.config.deployment import DeploymentSpec, GroupPlan
    from mstar_core.process.life import ChildArguments, ChildLife

STALL_SHARE: Final = 0.75
"""Share of the supervisor's limit on a start without progress that members wait for each other.

The limit of a member names the one that is missing; that of the supervisor only the phase.
"""


def join_place(arguments: ChildArguments, plan: GroupPlan, life: ChildLife) -> GroupPlace:
    """Report the phase `group` and return the place of this process. Raises ConfigError and TransportError."""
    spec, epoch = arguments.spec, arguments.incarnation
    meeting = _meeting(spec, plan, arguments.meet)
    hosts = "" if meeting is None else f" on {', '.join(dict.fromkeys(meeting.hosts))}"
    life.phase("group", detail=f"ranks {', '.join(map(str, plan.ranks))}{hosts}, epoch {epoch}")
    return GroupPlace(
        ranks=plan.ranks,
        rank=arguments.rank,
        epoch=epoch,
        folder=spec.ipc_dir,
        meeting=meeting,
        join_s=min(JOIN_S, STALL_SHARE * spec.stall_s),
    )


def _meeting(spec: DeploymentSpec, plan: GroupPlan, meet: str) -> Meeting | None:
    """Return the meeting place of a group on several hosts, None for a group on one."""
    hosts = tuple(spec.host_of(rank) for rank in plan.ranks)
    if not meet and len(set(hosts)) == 1:
        return None
    if not meet:
        raise ConfigError(
            f"the tensor-parallel group of ranks {', '.join(map(str, plan.ranks))} is on several hosts",
            "this process was started without --meet",
        )
    titles = {host.name: host.title or host.name or host.address for host in spec.hosts}
    return Meeting.parse(
        meet,
        address=spec.address,
        hosts=tuple(titles.get(host, host) for host in hosts),
        secret=read_keys(Path(spec.run_dir) / KEYS_FILE).secret.encode(),
    )
