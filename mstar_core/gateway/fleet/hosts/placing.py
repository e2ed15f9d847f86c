"""Order in which hosts are tried for a deployment, and the error if none can take it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from mstar_core.errors import MstarError, Unavailable
from mstar_core.gateway.fleet.hosting import Need

NO_MEMORY: Final = "no_memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A host for one more deployment. is_short: others must make room first. running: those of the model there."""

    host: str
    need: Need
    is_short: bool
    running: int


def ordered(options: Iterable[Option]) -> list[Option]:
    """Return hosts with free memory first, of these the ones with the fewest deployments of the model.

    Equal ones keep the order of the model's `hosts`.
    """
    return sorted(options, key=lambda option: (option.is_short, option.running))


def everywhere(model: str, faults: Mapping[str, MstarError]) -> Unavailable:
    """Return the error of a model that no host can run, with the cause of each."""
    first = next((error for error in faults.values() if error.code == NO_MEMORY), None)
    chosen = first or next(iter(faults.values()))
    causes = (f"{host}: {_cause(error)}" for host, error in faults.items())
    holders = [name for error in faults.values() for name in error.facts.get("holders", ())]
    facts = {"holders": holders} if holders else {}
    stated = [error.facts["retry_after_s"] for error in faults.values() if "retry_after_s" in error.facts]
    if stated:
        facts["retry_after_s"] = min(stated)
    hint = chosen.hint if first is None else "retry later"
    return Unavailable(f"no host can run {model}", "; ".join(causes), hint, code=chosen.code, **facts)


def _cause(error: MstarError) -> str:
    return f"{error.title} ({error.detail})" if error.detail else error.title
