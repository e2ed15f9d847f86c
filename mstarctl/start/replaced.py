"""Checks of `up --replace`: the deployment that is replaced, its name and address, and room for the new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.config.resolved import ResolvedConfig
from mstar_core.errors import NotFound, StartError, StateConflict, Unavailable, UsageError, did_you_mean
from mstar_core.host.hardware.gpus import Gpu
from mstar_core.host.run_dir import RunDirectory, deployments
from mstarctl.client.admin import AdminClient
from mstarctl.output import size_text
from mstarctl.start.hardware.capacity import free_bytes
from mstarctl.start.options import UpOptions

FLAG: Final = "--replace"
SERVING: Final = ("ready", "degraded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """A running deployment that `up` replaces. run: its directory itself. snapshot: of its supervisor."""

    run: RunDirectory
    spec: DeploymentSpec
    snapshot: Mapping[str, Any]

    def taken_over(self, config: ResolvedConfig, options: UpOptions) -> ResolvedConfig:
        """Return the configuration with name and address of this deployment. Raises for others that are stated.

        The api serves once the deployment is ready, because the old one serves until then.
        """
        if self.spec.hosts:
            raise several_hosts(f"{self.run.name} runs on {', '.join(host.title for host in self.spec.hosts)}")
        if options.name is not None and options.name != self.run.name:
            raise UsageError(
                f"--name {options.name} differs from --replace {self.run.name}",
                "the new deployment takes the name of the one that it replaces",
                "omit --name",
            )
        api = self.spec.api
        for key, value, stated in (("port", api.port, config.api.port), ("host", api.host, config.api.host)):
            if f"api.{key}" in config.provenance and stated != value:
                raise config.error(
                    f"api.{key}",
                    f"api.{key} is {stated}, and {self.run.name} serves on {api.host}:{api.port}",
                    "the new deployment takes over its listening socket",
                    f"omit the {key}; for another one start a deployment without --replace",
                )
        keys = dict.fromkeys(("name", "api.host", "api.port", "api.bind_when_ready"), FLAG)
        return msgspec.structs.replace(
            config,
            name=self.run.name,
            api=msgspec.structs.replace(config.api, host=api.host, port=api.port, bind_when_ready=True),
            provenance={**config.provenance, **keys},
        )

    def used_by_gpu(self) -> dict[str, int]:
        """Return the bytes that this deployment uses on its GPUs, by lock key."""
        used: dict[str, int] = {}
        for rank in self.snapshot["ranks"].values():
            key = self.spec.gpus.get(str(rank["device"]), "")
            used[key] = used.get(key, 0) + int(rank.get("memory_used") or 0)
        return used


def several_hosts(why: str) -> UsageError:
    """Return the error of a replacement by or of a deployment on several hosts."""
    return UsageError(
        "--replace and several hosts exclude each other",
        why,
        "start it under another --name, move the clients, then end the old one: mstarctl down NAME",
    )


def find_replaced(options: UpOptions) -> Replaced | None:
    """Return the deployment that `--replace` names, None without the option.

    Raises NotFound with the nearest name, also for one that ends meanwhile, StateConflict during an operation,
    Unavailable if it does not serve.
    """
    name = options.replace
    if name is None:
        if options.stop_first:
            raise UsageError("--stop-first needs --replace", hint="mstarctl up MODEL --replace NAME --stop-first")
        return None
    root = None if options.run_root is None else Path(options.run_root).expanduser().absolute()
    live = {run.name: run for run in deployments(root) if run.holder() is not None}
    if name not in live:
        hint = did_you_mean(name, live) if live else "start one with: mstarctl up MODEL"
        raise NotFound(f"no deployment {name!r} is running", hint=hint, kind="deployment", name=name)
    with AdminClient.of(live[name]) as admin:
        snapshot = admin.snapshot(("children", "ranks"))
    _check_idle(name, snapshot["deployment"])
    run = live[name].real
    try:
        spec = DeploymentSpec.load(run.spec)
    except FileNotFoundError as error:
        hint = "start the new one without --replace"
        raise NotFound(f"deployment {name!r} has just ended", hint=hint, kind="deployment", name=name) from error
    return Replaced(run=run, spec=spec, snapshot=snapshot)


def _check_idle(name: str, head: Mapping[str, Any]) -> None:
    latest = head.get("operation") or {}
    if latest.get("state") == "running":
        hint = f"mstarctl ps {name} shows its progress"
        raise StateConflict(f"a {latest['kind']} is in progress", str(latest["step"]), hint, code="in_progress")
    if head["state"] not in SERVING:
        hint = f"wait until mstarctl ps shows ready, or: mstarctl down {name}, then mstarctl up"
        raise Unavailable(f"{name} does not serve", f"it is {head['state']}", hint, code="not_ready")


def check_beside(
    old: Replaced,
    config: ResolvedConfig,
    keys: Mapping[str, str],
    gpus: Sequence[Gpu],
    needed: int,
    *,
    stop_first: bool,
) -> None:
    """Raise StartError, with the bytes that are missing, if the new deployment does not fit beside the old one.

    It is taken to need what its weights need, and with the same model and caches what the old one uses. stop_first: it
    needs no room beside the old one, and what that uses counts as free. keys: lock key by device, empty on the CPU.
    needed: least bytes of the weights of all ranks; 0 if unknown.
    """
    before = old.spec
    is_alike = (config.model, config.variant, config.kv_cache) == (before.model, before.variant, before.kv_cache)
    name = config.name
    if not keys:
        used = sum(int(child.get("resident_bytes") or 0) for child in old.snapshot["children"].values())
        least, freed = (needed, used) if stop_first else (max(needed, used if is_alike else 0), 0)
        _check_room(name, "on this host", least, free_bytes({}, ()), freed)
        return
    used_by_key = old.used_by_gpu()
    by_uuid = {gpu.uuid: gpu for gpu in gpus if gpu.uuid}
    known = {key: by_uuid[key] for key in keys.values() if key in by_uuid}
    if len(known) == len(set(keys.values())):
        freed = sum(used_by_key.get(key, 0) for key in known) if stop_first else 0
        _check_room(name, "on its GPUs", needed, sum(gpu.free for gpu in known.values()), freed)
    if is_alike and not stop_first:
        for device, key in keys.items():
            if key in known:
                _check_room(name, f"on {device}", used_by_key.get(key, 0), known[key].free)


def _check_room(name: str, where: str, needed: int, free: int, freed: int = 0) -> None:
    """Raise StartError if the memory does not suffice. freed: bytes that the end of the old deployment frees."""
    room = free + freed
    if not free or needed <= room:
        return
    besides = "even without" if freed else "beside"
    advice = "use other devices or a smaller model"
    hint = advice if freed else f"add --stop-first: the running one then ends first; or {advice}"
    raise StartError(
        f"the new {name} does not fit {besides} the running one",
        f"{size_text(needed)} are needed {where} and {size_text(room)} are free: {needed - room:,} bytes too few",
        hint,
        phase="plan",
        code="no_room",
    )
