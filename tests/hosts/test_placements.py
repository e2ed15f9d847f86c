"""Requests are answered over two hosts with the bytes of one host: miniatures, split and in groups.

Inputs, outputs and streams cross between the hosts. The other cases: `python -m pytest -m slow tests/hosts`. Copies,
and speech whose codec is on the other host, are in test_deaths.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from bench.soak.answers import Answer, flaws
from mstar_core.config.deployment import Plan
from tests.hosts.spread import Spread
from tests.runtime.deployment import LLM, SNAC, plan
from tests.survival.families import FAMILIES, TWO_RANKS
from tests.survival.judge import Judge, judge_of
from tests.survival.mortal import Mortal

SPEECH = plan({0: (LLM,), 1: (SNAC,)})


@dataclass(frozen=True, kw_only=True)
class Case:
    """A placement of a family. remote: ranks on the other host."""

    family: str
    where: Plan
    remote: tuple[int, ...]


CASES = {
    "orpheus-codec": Case(family="orpheus", where=SPEECH, remote=(1,)),
    "orpheus-language": Case(family="orpheus", where=SPEECH, remote=(0,)),
    "orpheus-group": Case(family="orpheus_tp2", where=TWO_RANKS, remote=(1,)),
    "qwen3_omni-talker": Case(
        family="qwen3_omni",
        where=plan({0: ("audio_encoder", "Thinker"), 1: ("vision_encoder", "Talker", "Code2Wav")}),
        remote=(1,),
    ),
    "pi05-images": Case(family="pi05", where=plan({0: ("vit_encoder",), 1: (LLM,)}), remote=(0,)),
    "bagel-images": Case(
        family="bagel",
        where=plan({0: (LLM, "combine_cfg"), 1: ("vit_encoder", "vae_encoder", "vae_decoder")}),
        remote=(1,),
    ),
    "vjepa2_ac-rollout": Case(
        family="vjepa2_ac",
        where=plan({0: ("video_encoder",), 1: ("ac_predictor", "mpc_scorer", "cem_sampler", "cem_update")}),
        remote=(1,),
    ),
}
SLOW = {"orpheus-codec", "orpheus-language", "bagel-images", "vjepa2_ac-rollout"}


class References:
    """Answers of one host, by family. One deployment at a time."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Answer]] = {}

    async def of(self, family: str) -> dict[str, Answer]:
        """Return the answers to all requests of a family."""
        if family not in self._known:
            with ExitStack() as stack:
                deployment = await asyncio.to_thread(stack.enter_context, Mortal(FAMILIES[family]))
                self._known[family] = await answers(judge_of(deployment))
        return self._known[family]


async def answers(judge: Judge) -> dict[str, Answer]:
    """Return the answers to all requests of a deployment, one after the other."""
    return {name: await judge.undisturbed(name) for name in judge.bodies}


@pytest.fixture(scope="module")
def references() -> References:
    return References()


def cases() -> Iterator[object]:
    for name in CASES:
        yield pytest.param(name, marks=(pytest.mark.slow,) if name in SLOW else ())


@pytest.mark.parametrize("name", list(cases()))
async def test_the_answers_are_those_of_one_host(name: str, references: References) -> None:
    case = CASES[name]
    expected = await references.of(case.family)
    deployment = Spread(FAMILIES[case.family], case.where, case.remote)
    with ExitStack() as stack:
        await asyncio.to_thread(stack.enter_context, deployment)
        actual = await answers(judge_of(deployment))
        assert {request: flaws(actual[request], expected[request]) for request in expected} == {
            request: [] for request in expected
        }
        assert len(deployment.agent_folders()) == 1
        deployment.assert_clean()
        assert deployment.stop() == 0
        deployment.assert_gone()
        assert deployment.complaints() == []
