"""Kills in every phase of every family's requests: the client receives what it receives without them.

The whole sweep: `python -m pytest -m slow tests/survival/test_kills.py -k everywhere`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.survival.families import FAMILIES
from tests.survival.judge import Judge, judge_of
from tests.survival.mortal import Mortal
from tests.survival.points import PHASES, VICTIMS, WORKER, Point, points_of
from tests.survival.strikes import Strike

CASES = [
    pytest.param(family, phase, victim, id=f"{family}-{phase}-{victim}")
    for family, phases in PHASES.items()
    for phase in phases
    for victim in VICTIMS
]
PAIRS = [(first, second) for first in VICTIMS for second in VICTIMS if first != second]
PARKED = {
    "orpheus": PAIRS,
    "qwen3_omni": [(WORKER, "api")],
    "bagel": [(WORKER, "conductor")],
    "pi05": [("conductor", WORKER)],
}
TWICE = [
    pytest.param(family, first, second, id=f"{family}-{first}-{second}")
    for family, pairs in PARKED.items()
    for first, second in pairs
]
MIDDLE = {"orpheus": "codec", "qwen3_omni": "decode", "bagel": "flow", "pi05": "flow"}
"""Phase of the first of two deaths."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def judges() -> Iterator[dict[str, Judge]]:
    """One deployment at a time, since two cores have no room for more."""
    running: dict[str, Judge] = {}
    yield running
    for judge in running.values():
        judge.deployment.end()


def judge_for(family: str, judges: dict[str, Judge]) -> Judge:
    """Return the judge of a family, after ending the deployment of another one."""
    if family not in judges:
        for name in list(judges):
            judges.pop(name).deployment.end()
        judges[family] = judge_of(Mortal(FAMILIES[family]).__enter__())
    return judges[family]


@pytest.mark.parametrize(("family", "phase", "victim"), CASES)
async def test_a_death_changes_nothing_that_the_client_receives(
    family: str, phase: str, victim: str, judges: dict[str, Judge]
) -> None:
    judge = await asyncio.to_thread(judge_for, family, judges)
    point = PHASES[family][phase]
    assert await judge.flaws(point.request, point.strike(victim)) == []


@pytest.mark.parametrize(("family", "first", "second"), TWICE)
async def test_a_second_death_while_a_request_resumes(
    family: str, first: str, second: str, judges: dict[str, Judge]
) -> None:
    judge = await asyncio.to_thread(judge_for, family, judges)
    point = PHASES[family][MIDDLE[family]]
    again = Strike(victim=second, sender="api", message="NewRequest", attempt=2)
    assert await judge.flaws(point.request, point.strike(first), again) == []


async def test_a_request_that_two_workers_die_with_fails_with_that_cause(judges: dict[str, Judge]) -> None:
    judge = await asyncio.to_thread(judge_for, "orpheus", judges)
    again = Strike(victim=WORKER, sender=WORKER, message="Outputs", count=2)
    answer = await judge.disturbed("speech", PHASES["orpheus"]["codec"].strike(WORKER), again)
    assert [line["modality"] for line in answer.ends] == ["error"]
    assert answer.code == "worker_lost"


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize(
    ("family", "request_name"), [(name, each) for name, family in FAMILIES.items() for each in family.changes]
)
async def test_deaths_everywhere_change_nothing(
    family: str, request_name: str, victim: str, judges: dict[str, Judge]
) -> None:
    judge = await asyncio.to_thread(judge_for, family, judges)
    found: dict[Point, object] = {}
    for point in points_of(request_name, await judge.messages(request_name)):
        try:
            flaws: object = await judge.flaws(request_name, point.strike(victim))
        except AssertionError as error:  # go on with the others: one run is to show all points that fail
            flaws = str(error)
        if flaws:
            found[point] = flaws
            print(f"{victim} at {point}: {flaws}", flush=True)
    assert found == {}
