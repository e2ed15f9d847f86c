"""`mstarctl scale`: adds replicas to a running deployment, or removes some."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mstar_core.host.gpu_locks import gpu_holder
from mstar_core.host.hardware.gpus import gpu_keys, gpus, visible_gpus
from mstarctl.client.reach import only_here, reached
from mstarctl.complete import DeploymentName
from mstarctl.output import Printer
from mstarctl.output.units import counted
from mstarctl.start.operation import follow


def scale(
    ctx: typer.Context,
    name: DeploymentName = None,
    *,
    replicas: Annotated[int, typer.Option("--replicas", metavar="N", help="replicas of every node")],
    is_waiting: Annotated[bool, typer.Option("--wait/--no-wait", help="return when it has them")] = True,
) -> None:
    """Add or remove replicas of a running deployment."""
    printer = Printer.of(ctx)
    only_here(printer.options, "scale")
    with reached(printer.options, name) as target:
        on_gpus = any(rank["device"] != "cpu" for rank in target.admin.snapshot(("ranks",))["ranks"].values())
        free = free_devices() if on_gpus else []
        operation = target.admin.send("/v1/deployment/scale", {"replicas": replicas, "free": free})["operation"]
        printer.say(f"{target.name}: changing to {counted(replicas, 'replica')}; requests go on")
        head = follow(target.admin, operation, printer.say) if is_waiting else target.admin.head()
        printer.say(f"{target.name} is {head['state']} with {counted(head['ranks'], 'rank')}")
        most = f"up to {counted(head['slots'], 'request')} at once"
        printer.say(f"  {most}: mstarctl set {target.name} max_concurrent_requests=N changes that")
    if printer.is_machine:
        item = {"name": target.name, "state": head["state"], "ranks": head["ranks"], "replicas": replicas}
        printer.item("deployment", item, "")


def free_devices() -> list[dict[str, Any]]:
    """Return the visible GPUs that no deployment has locked."""
    present = gpus()
    visible = visible_gpus(present)
    keys = gpu_keys([f"cuda:{index}" for index in range(len(visible))], present)
    return [
        {"name": device, "key": key, "free_bytes": gpu.free}
        for (device, key), gpu in zip(keys.items(), visible, strict=True)
        if gpu_holder(key) is None
    ]
