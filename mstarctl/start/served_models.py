"""Check of the models of a serve.yaml before a gateway starts: each needs a file that fits the devices it may use."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from mstar_core.config.files.faults import Faults
from mstar_core.errors import ConfigError, MstarError, NotFound, PluginError, UsageError
from mstar_core.gateway.fleet.hosting import Need
from mstar_core.gateway.fleet.hosts.remote_host import RemoteHost
from mstar_core.gateway.fleet.local_host import set_texts, start_words
from mstar_core.gateway.fleet.plans import KeptPlans, surveyed
from mstar_core.gateway.serve_file import ModelEntry, ServeFile, hosts_of
from mstar_core.gateway.sleep_rule import with_default
from mstar_core.gateway.tenants.accounts.folder import gateway_folder
from mstar_core.host.other_hosts.contexts import LOCAL, Contexts
from mstarctl.output import Printer
from mstarctl.start.hardware.budget import planned_memory
from mstarctl.start.options import Device, UpOptions
from mstarctl.start.plan import Planned, make_planned

NEVER: Final = "gpu_memory_never"
LASTING: Final = (ConfigError.code, NotFound.code, PluginError.code, UsageError.code, NEVER)
"""Codes of errors after which only another entry, plugin or device helps."""


def check_starts(serve: ServeFile, printer: Printer) -> None:
    """Plan one deployment of each model, and print the files that were chosen for the devices.

    The gateway takes these plans over. Raises ConfigError with the place of every model that can never start as it is
    written. What may be mended while the gateway runs, such as a missing folder of weights, is a warning.
    """
    faults, plans = Faults(), KeptPlans(gateway_folder())
    check_hosts(serve, printer, faults)
    for entry in serve.models.values():
        if entry.url is not None or LOCAL not in hosts_of(entry, serve):
            continue
        with faults.collected():
            try:
                planned = make_planned(options_of(entry, serve), is_survey=True)
                keep_plan(plans, entry, serve, planned)
            except MstarError as error:
                if not is_lasting(error):
                    printer.warn(f"{entry.name} cannot start now: {error.title}")
                    continue
                raise fault_of(entry, error) from error
            if said := choice_text(planned):
                printer.say(f"  {entry.name}: {said}")
    faults.check()


def keep_plan(plans: KeptPlans, entry: ModelEntry, serve: ServeFile, planned: Planned) -> None:
    """Keep the plan of a model for the gateway. planned: with the budget of its entry. Raises the error of a plan."""
    options, known = options_of(entry, serve), {entry.memory_text or "": planned}

    def plan(budget: str) -> dict[str, Any]:
        made = known.get(budget) or make_planned(replace(options, memory=budget), is_survey=True)
        return plan_facts(made)

    model = _with_default(entry, serve)
    plans.keep(model, start_words(model), surveyed(model, plan))


def plan_facts(planned: Planned) -> dict[str, Any]:
    """Return what a gateway reads of a plan, as `mstarctl plan` prints it."""
    spec = planned.spec
    return {
        "config": spec.config_file,
        "why": planned.devices.why,
        "memory": planned_memory(spec),
        "can_sleep": spec.can_sleep,
    }


def check_hosts(serve: ServeFile, printer: Printer, faults: Faults) -> None:
    """Connect to the other hosts and plan the models there. A host that cannot be used now is a warning.

    Collects a ConfigError for an unknown context, and for a model that can never start on any of its hosts.
    """
    entries = [entry for entry in serve.models.values() if entry.url is None]
    names = dict.fromkeys(host for entry in entries for host in hosts_of(entry, serve) if host != LOCAL)
    contexts = Contexts.load() if names else Contexts()
    for entry in entries:
        for host in hosts_of(entry, serve):
            with faults.collected():
                try:
                    contexts.get(host)
                except NotFound as error:
                    raise fault_of(entry, error) from error
    known = {name: RemoteHost(name, str(contexts.remote[name].ssh)) for name in names if name in contexts.remote}
    found = asyncio.run(_surveyed(known, serve)) if known else {}
    for host, answers in found.items():
        for name, answer in answers.items():
            if isinstance(answer, MstarError):
                printer.warn(f"{name or 'no model'} cannot start on host {host} now: {answer}")
            else:
                why = f" ({answer.why})" if answer.why else ""
                printer.say(f"  {name} on {host}: {Path(answer.config).name}{why}")
    for entry in entries:
        answers_of = [found.get(host, {}).get(entry.name) for host in hosts_of(entry, serve)]
        lasting = [each for each in answers_of if isinstance(each, MstarError) and each.code in LASTING]
        with faults.collected():
            if len(lasting) == len(answers_of):
                raise fault_of(entry, lasting[0])


async def _surveyed(hosts: Mapping[str, RemoteHost], serve: ServeFile) -> dict[str, dict[str, Need | MstarError]]:
    """Return what each host says about each model that may run there; one entry without a name if it is unreachable."""
    found: dict[str, dict[str, Need | MstarError]] = {host: {} for host in hosts}

    async def survey(name: str, host: RemoteHost) -> None:
        await host.start()
        try:
            if host.fault is not None:
                found[name][""] = host.fault
                return
            for entry in serve.models.values():
                if entry.url is None and name in hosts_of(entry, serve):
                    try:
                        found[name][entry.name] = await host.survey(_with_default(entry, serve))
                    except MstarError as error:
                        found[name][entry.name] = error
        finally:
            await host.close()

    await asyncio.gather(*(survey(name, host) for name, host in hosts.items()))
    return found


def options_of(entry: ModelEntry, serve: ServeFile) -> UpOptions:
    """Return the options with which the gateway plans and starts a model. They match `start_words`."""
    entry = _with_default(entry, serve)
    return UpOptions(
        target=entry.target,
        config=None if entry.file is None else Path(entry.file),
        weights=None if entry.weights is None else Path(entry.weights),
        device=None if entry.device is None else Device(entry.device),
        gpus=entry.gpus,
        is_fitted=entry.file is None,
        memory=entry.memory_text,
        sets=set_texts(entry),
    )


def _with_default(entry: ModelEntry, serve: ServeFile) -> ModelEntry:
    return msgspec.structs.replace(entry, sleepable=None if "sleepable" in entry.set else with_default(entry, serve))


def is_lasting(error: MstarError) -> bool:
    """Return whether only another entry, plugin or device helps."""
    return isinstance(error, ConfigError | NotFound | PluginError | UsageError) or error.code in LASTING


def fault_of(entry: ModelEntry, error: MstarError) -> ConfigError:
    """Return the error of a model with the place of its entry."""
    file, _, line = entry.source.rpartition(":")
    return ConfigError(
        f"{entry.name} cannot start: {error.title}",
        error.detail,
        error.hint,
        file=file or None,
        line=int(line) if line.isdecimal() else None,
        key=f"models.{entry.name}",
    )


def choice_text(planned: Planned) -> str:
    """Return the file that was chosen with its reason; empty if the model's own was kept."""
    path = planned.spec.config_file
    return f"{Path(path or '').name} ({planned.devices.why})" if planned.is_chosen else ""
