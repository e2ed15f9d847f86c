"""Kills in every phase of every family's requests: the client receives the bytes of the undisturbed run.

Without `slow`, each phase of each family meets one death, and speech all of them. All deaths in all phases, and before
and after every message of every request: `python -m pytest -m slow tests/survival/test_kills.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count, permutations
from typing import Any

import pytest

from mstar_bagel.graph import SAVED_STEPS
from tests.survival.families import FAMILIES
from tests.survival.judge import Judge, judge_of
from tests.survival.mortal import Mortal
from tests.survival.points import FOLLOWER, PHASES, VICTIMS, WORKER, Point, planned, points_of
from tests.survival.strikes import Sent, Strike

GROUP = "orpheus_tp2"
ALWAYS = "orpheus"
"""The family whose every phase meets every death without `slow`."""

FIRST = {
    "orpheus": PHASES["orpheus"]["codec"],
    "qwen3_omni": PHASES["qwen3_omni"]["decode"],
    "bagel": PHASES["bagel"]["flow"],
    "pi05": planned("act", "prefill"),
    "vjepa2_ac": PHASES["vjepa2_ac"]["rollout"],
}
"""Point of the first of two deaths: the request cannot end without any of the processes.

Pi0.5 gets both walks at once, and its worker reports the end with the outputs. So its conductor must die before.
"""


def victims_of(family: str) -> tuple[str, ...]:
    """Return the processes of a family's deployment that are killed."""
    return (FOLLOWER, *VICTIMS) if family == GROUP else VICTIMS


def cases() -> Iterator[Any]:
    """Yield all phases with all victims; one victim after the other runs without `slow`."""
    turn = count()
    for family, phases in PHASES.items():
        for phase in phases:
            victims = victims_of(family)
            chosen = FOLLOWER if family == GROUP and phase == "codec" else VICTIMS[next(turn) % len(VICTIMS)]
            for victim in victims:
                runs = family == ALWAYS or (victim == chosen and (family != GROUP or victim == FOLLOWER))
                marks = () if runs else (pytest.mark.slow,)
                yield pytest.param(family, phase, victim, id=f"{family}-{phase}-{victim}", marks=marks)


def pairs() -> Iterator[Any]:
    """Yield the deaths of two different processes; each first victim runs once without `slow`."""
    chosen = {(ALWAYS, WORKER, "conductor"), (ALWAYS, "conductor", "api"), (ALWAYS, "api", WORKER)}
    for family in FIRST:
        for first, second in permutations(VICTIMS, 2):
            marks = () if (family, first, second) in chosen else (pytest.mark.slow,)
            yield pytest.param(family, first, second, id=f"{family}-{first}-{second}", marks=marks)


@pytest.fixture(scope="module")
def judges() -> Iterator[dict[str, Judge]]:
    """One deployment at a time, since two cores have no room for more."""
    running: dict[str, Judge] = {}
    yield running
    for judge in running.values():
        judge.deployment.end()


async def judge_for(family: str, judges: dict[str, Judge]) -> Judge:
    """Return the judge of a family, after ending the deployment of another one."""
    if family not in judges:
        for name in list(judges):
            judges.pop(name).deployment.end()
        judges[family] = judge_of(await asyncio.to_thread(Mortal(FAMILIES[family]).__enter__))
    return judges[family]


@pytest.mark.parametrize(("family", "phase", "victim"), list(cases()))
async def test_a_death_changes_nothing_that_the_client_receives(
    family: str, phase: str, victim: str, judges: dict[str, Judge]
) -> None:
    judge, point = await judge_for(family, judges), PHASES[family][phase]
    assert await judge.flaws(point.request, point.strike(victim)) == []


@pytest.mark.parametrize(("family", "first", "second"), list(pairs()))
async def test_a_second_death_while_a_request_resumes(
    family: str, first: str, second: str, judges: dict[str, Judge]
) -> None:
    judge, point = await judge_for(family, judges), FIRST[family]
    again = Strike(victim=second, sender="api", message="NewRequest")
    assert await judge.flaws(point.request, point.strike(first), again) == []


async def test_a_request_that_two_workers_die_with_fails_with_that_cause(judges: dict[str, Judge]) -> None:
    judge = await judge_for("orpheus", judges)
    again = Strike(victim=WORKER, sender=WORKER, message="Outputs", count=2)
    answer = await judge.disturbed("speech", PHASES["orpheus"]["codec"].strike(WORKER), again)
    assert [line["modality"] for line in answer.ends] == ["error"]
    assert answer.code == "poison_request"


@pytest.mark.parametrize("victim", [WORKER, pytest.param("conductor", marks=pytest.mark.slow)])
async def test_an_image_goes_on_from_its_last_saved_step(victim: str, judges: dict[str, Judge]) -> None:
    judge, point = await judge_for("bagel", judges), PHASES["bagel"]["flow"]
    sent = await judge.messages(point.request)
    steps, runs = steps_in(sent), sum(len(each.parts) for each in sent if each.message == "RunWalks")
    judge.deployment.strikes.record()
    assert await judge.flaws(point.request, point.strike(victim)) == []
    repeated = steps_in(judge.deployment.strikes.recorded()) - steps
    assert repeated <= SAVED_STEPS + runs < point.count, "each run repeats one step, the interrupted one a few"


def steps_in(sent: list[Sent]) -> int:
    """Return the number of denoising steps that workers have reported."""
    return sum(part == "progress" for each in sent if each.message == "Outputs" for part in each.parts)


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize(
    ("family", "name", "victim"),
    [(key, name, victim) for key, family in FAMILIES.items() for name in family.changes for victim in victims_of(key)],
)
async def test_a_death_at_any_message_changes_nothing(
    family: str, name: str, victim: str, judges: dict[str, Judge]
) -> None:
    judge = await judge_for(family, judges)
    failed: dict[Point, object] = {}
    for point in points_of(name, await judge.messages(name)):
        try:
            flaws: object = await judge.flaws(name, point.strike(victim))
        except AssertionError as error:  # go on with the others: one run shows all points that fail
            flaws = str(error)
        if flaws:
            failed[point] = flaws
            print(f"{victim} at {point}: {flaws}", flush=True)
    assert failed == {}
