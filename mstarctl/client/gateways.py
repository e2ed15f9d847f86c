"""Running gateways of this host, and the addresses of the models behind one. Used by commands that take a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from mstar_core.errors import MstarError, NotFound, Unreachable, UsageError, did_you_mean
from mstar_core.host.run_dir import RunDirectory, gateways
from mstarctl.client.admin import AdminClient
from mstarctl.client.deployments import ANSWER_S, Known, find_running

AWAKE: Final = ("ready", "idle")


def find_gateway(name: str | None) -> RunDirectory:
    """Return the running gateway called `name`, or the only one. Raises NotFound with the nearest name."""
    live = running_gateways()
    if name is None and len(live) == 1:
        return next(iter(live.values()))
    if name is not None and name in live:
        return live[name]
    if not live:
        raise NotFound("no gateway is running", hint="start one with: mstarctl serve", kind="gateway", name=name or "")
    if name is None:
        hint = f"name one of: {', '.join(sorted(live))}"
        raise NotFound(f"{len(live)} gateways are running", hint=hint, kind="gateway", name="")
    raise NotFound(f"no gateway {name!r} is running", hint=did_you_mean(name, live), kind="gateway", name=name)


def running_gateways() -> dict[str, RunDirectory]:
    """Return the running gateways of this host by name."""
    return {run.name: run for run in gateways() if run.holder() is not None}


def known_gateways(is_chosen: Callable[[str], bool] = lambda _: True) -> list[Known]:
    """Return the gateways of this host as `ps` lists them, by name."""
    return [_known(run) for run in gateways() if is_chosen(run.name)]


def _known(run: RunDirectory) -> Known:
    pid = run.holder()
    if pid is None:
        return Known(name=run.name, state="stale", run=run)
    try:
        with AdminClient.of(run, ANSWER_S) as admin:
            snapshot = admin.snapshot()
    except (Unreachable, MstarError):
        return Known(name=run.name, state="silent", run=run, pid=pid)
    head = snapshot["deployment"]
    return Known(
        name=run.name, state=str(head["state"]), run=run, pid=pid, snapshot=snapshot, log_dir=Path(head["log_dir"])
    )


def gateway_of_model(name: str) -> RunDirectory | None:
    """Return the running gateway that serves a model of this name, None without one. Raises NotFound for several."""
    found = [run for run in running_gateways().values() if name in _names(run)]
    if len(found) > 1:
        hint = f"name one of them: {', '.join(f'{run.name} --model {name}' for run in found)}"
        raise NotFound(f"{len(found)} gateways serve {name!r}", hint=hint, kind="model", name=name)
    return found[0] if found else None


def _names(run: RunDirectory) -> set[str]:
    try:
        with AdminClient.of(run, ANSWER_S) as admin:
            items = admin.get("/v1/models")["items"]
    except MstarError:
        return set()
    return {str(name) for item in items for name in (item["name"], *item["aliases"])}


def is_gateway_list(cards: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the entries of GET /v1/models come from a gateway, which adds the state of each model."""
    return bool(cards) and all("state" in card and "replicas" in card for card in cards)


def chosen_card(cards: Sequence[Mapping[str, Any]], name: str | None, where: str, url: str) -> Mapping[str, Any]:
    """Return the entry of the model or adapter that is named, or of the only model, in a gateway's /v1/models.

    where: the gateway in an error. Raises UsageError if several models are served and none is named, NotFound for an
    unknown one.
    """
    models = [str(card["id"]) for card in cards if "parent" not in card]
    if name is None:
        if len(models) == 1:
            return next(card for card in cards if "parent" not in card)
        raise UsageError(
            f"{where} serves {len(models)} models, and none is named",
            f"its models: {', '.join(models)}",
            f"--model {models[0]}, or --url {model_url(url, models[0])}",
        )
    found = next((card for card in cards if name == card["id"] or name in card.get("aliases", ())), None)
    if found is None:
        hint = did_you_mean(name, [str(card["id"]) for card in cards])
        raise NotFound(f"{where} serves no model {name!r}", hint=hint, kind="model", name=name)
    return found


def model_of(card: Mapping[str, Any]) -> str:
    """Return the model of an entry of a gateway's /v1/models; that of an adapter is its parent."""
    return str(card.get("parent") or card["id"])


def is_awake(card: Mapping[str, Any]) -> bool:
    """Return whether the model of an entry answers at once."""
    return card["state"] in AWAKE


def model_url(url: str, model: str) -> str:
    """Return the address of one model of a gateway. It has every route of a deployment."""
    return f"{url.rstrip('/')}/m/{quote(model, safe='')}"


def running_here(name: str | None, serve: Sequence[str] = ("ls",)) -> RunDirectory:
    """Return the running deployment called `name`, or the only one.

    serve: commands of `mstarctl serve` that an error names if a gateway has the name. Raises UsageError for a gateway,
    NotFound with the nearest name.
    """
    try:
        return find_running(name)
    except NotFound:
        if name in running_gateways():
            raise not_a_deployment(str(name), serve) from None
        raise


def not_a_deployment(name: str, serve: Sequence[str]) -> UsageError:
    """Return the error of a command for deployments that got a gateway. serve: commands of `serve` in its place."""
    ways = " or ".join(f"mstarctl serve {verb} {name}" for verb in serve)
    return UsageError(f"{name!r} is a gateway, not a deployment", "this command works on one deployment", ways)
