"""Configuration keys that change while a deployment runs: their checks by the supervisor, their use by the api."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from mstar_core.config.deployment import DeploymentSpec, Plan
from mstar_core.config.files.read import check
from mstar_core.config.key import Setting
from mstar_core.config.located import Located
from mstar_core.config.schema import SETTINGS
from mstar_core.errors import did_you_mean

REQUESTS: Final = "max_concurrent_requests"
LIVE_SETTINGS: Final[Mapping[str, Setting]] = {item.key: item for item in SETTINGS if item.is_live}
COMMAND: Final = "mstarctl set"


def with_live(spec: DeploymentSpec, values: Mapping[str, Any], at: str) -> DeploymentSpec:
    """Return a deployment with other values of live keys. at: the time, for the source of the values.

    Raises ConfigError for an unknown key, one that is not live, and a value out of range or beyond the ranks' slots.
    """
    checked = {key: check(Located(value, COMMAND), _live(key), key) for key, value in values.items()}
    if REQUESTS in checked:
        _check_slots(spec, checked[REQUESTS])
    provenance = {**spec.provenance, **dict.fromkeys(checked, f"set live at {at}")}
    return msgspec.structs.replace(_replaced(spec, checked), provenance=provenance, slots=spec.rank_slots)


def take_live(spec: DeploymentSpec, newer: DeploymentSpec) -> DeploymentSpec:
    """Return `spec` with the values of live keys of `newer`."""
    return _replaced(spec, {key: _value(newer, key) for key in LIVE_SETTINGS})


def carried_requests(plan: Plan, slots: int) -> int:
    """Return the requests at once that the replicas of a plan carry. slots: of each rank."""
    return slots * min((len(place.replicas) for place in plan.placements), default=1)


def _live(key: str) -> Setting:
    """Return the setting of a live key. Raises ConfigError for another key."""
    if key in LIVE_SETTINGS:
        return LIVE_SETTINGS[key]
    known = {item.key: item for item in SETTINGS}
    place = Located(None, COMMAND)
    if key not in known:
        raise place.error(f"unknown key {key!r}", key, hint=did_you_mean(key, LIVE_SETTINGS))
    hint = f"mstarctl down, then mstarctl up with --set {key}=VALUE"
    if known[key].is_reread:
        hint = "change the content of the file, then mstarctl reload"
    raise place.error(
        f"{key} cannot be changed while the deployment runs", key, "processes read it at their start", hint
    )


def _check_slots(spec: DeploymentSpec, requests: int | None) -> None:
    most = carried_requests(spec.plan, spec.rank_slots)
    if requests is None or requests > most:
        raise Located(None, COMMAND).error(
            f"{REQUESTS} is {requests}",
            REQUESTS,
            f"each rank was started with {spec.rank_slots} slots, for which its caches and CUDA graphs are sized;"
            f" its replicas carry {most} requests",
            f"set at most {most}, or start it again with --set {REQUESTS}={requests}",
        )


def _value(spec: DeploymentSpec, key: str) -> Any:
    value: Any = spec
    for word in key.split("."):
        value = getattr(value, word)
    return value


def _replaced(spec: DeploymentSpec, values: Mapping[str, Any]) -> DeploymentSpec:
    for key, value in values.items():
        section, _, word = key.rpartition(".")
        if section:
            word, value = section, msgspec.structs.replace(getattr(spec, section), **{word: value})
        spec = msgspec.structs.replace(spec, **{word: value})
    return spec
