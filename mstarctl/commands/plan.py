"""`mstarctl plan`: memory that a deployment would take of each device, its holders, and the rest."""

from __future__ import annotations

from typing import Any

import typer

from mstar_core.errors import MstarError
from mstarctl.client.reach import only_here
from mstarctl.commands.up import rank_item
from mstarctl.objects.deployment import held_text, places
from mstarctl.output import Printer
from mstarctl.start.hardware.budget import memory_lines, planned_memory
from mstarctl.start.nearest import with_nearest
from mstarctl.start.options import UpOptions, up_signature
from mstarctl.start.plan import Planned, make_planned


def plan(ctx: typer.Context, **flags: Any) -> None:
    """Show the memory that a deployment would take of each device, its holders and the rest."""
    printer = Printer.of(ctx)
    only_here(printer.options, "plan")
    options = UpOptions(**flags)
    try:
        planned = make_planned(options, is_survey=True)
    except MstarError as error:
        raise with_nearest(error, options) from error.__cause__
    show(planned, printer)


vars(plan)["__signature__"] = up_signature()


def show(planned: Planned, printer: Printer) -> None:
    """Print ranks and memory. `fits` says whether the memory is free now."""
    spec = planned.spec
    memory = planned_memory(spec)
    ranks = [rank_item(rank, spec.hosts) for rank in spec.plan.ranks]
    item = {
        "name": spec.name,
        "model": spec.model,
        "config": spec.config_file,
        "why": planned.devices.why,
        "weights": spec.weights_source,
        "needed_bytes": spec.needed_bytes,
        "memory_budget": spec.memory_budget,
        "max_concurrent_requests": spec.max_concurrent_requests,
        "ranks": ranks,
        "nodes": places(spec.plan),
        "memory": memory,
        "can_sleep": spec.can_sleep,
        "fits": all(each["left_bytes"] >= 0 for each in memory),
    }
    lines = [f"rank {rank['rank']}  {rank['device']}  {held_text(rank)}" for rank in ranks]
    if not memory:
        lines.append("memory  no device with a ledger: the ranks use memory of the host")
    sleeps = "can" if spec.can_sleep else "cannot; --set sleepable=true starts it so that it can"
    printer.item("plan", item, [*lines, *memory_lines(memory), f"sleep   {sleeps}"])
