"""Rules of the fleet with fake deployments and a clock that tests move: loads, sleeps, waits and refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mstar_core.errors import MstarError, StartError, Unavailable
from mstar_core.gateway.fleet.hosts.hosts import FleetHosts
from mstar_core.gateway.fleet.managed import ManagedFleet
from mstar_core.gateway.fleet.owned import owner_token
from mstar_core.gateway.fleet.running import RunningFleet
from mstar_core.gateway.parts import LoadProgress, ModelState, ModelStatus
from mstar_core.gateway.serve_file import MemorySpec, ModelEntry, ServeFile
from tests.fakes.fleet import TOTAL, FakeHost, MovedClock, run_scene, settle

Needs = Mapping[str, Mapping[str, int]]

NO_LIMITS = MemorySpec()


class Stage:
    """A fleet on a fake host. entry fields by model: `Stage(tmp, {"a": {"0": 60}}, a={"keep_text": "always"})`."""

    def __init__(
        self,
        folder: Path,
        needs: Needs,
        host: FakeHost | None = None,
        memory: MemorySpec = NO_LIMITS,
        **fields: dict[str, Any],
    ) -> None:
        self.host = FakeHost(needs) if host is None else host
        self.clock = MovedClock()
        entries = {name: ModelEntry(target=name, name=name, **fields.get(name, {})) for name in needs}
        self.serve = ServeFile(models=entries, memory=memory, discover=False)
        self.fleet = ManagedFleet(
            self.serve,
            FleetHosts(lambda name: self.host),
            self.clock,
            RunningFleet(self.serve),
            owner_token(folder / "state"),
        )
        self.progress: list[LoadProgress] = []

    async def ready(self, model: str) -> list[str]:
        """Names of the deployments that take a request now."""
        return [each.deployment for each in await self.fleet.ready(model, self.progress.append)]

    async def request(self, model: str) -> None:
        """Run one short request."""
        replicas = await self.fleet.ready(model, self.progress.append)
        with self.fleet.using(replicas[0]):
            await asyncio.sleep(0)

    def status(self, model: str) -> ModelStatus:
        return next(status for status in self.fleet.models() if status.name == model)

    async def later(self, seconds: float) -> None:
        await self.clock.advance(seconds)


def played(play: Callable[[Stage], Any], *arguments: Any, **fields: Any) -> Stage:
    """Run a scene and close the fleet."""
    return run_scene(lambda: Stage(*arguments, **fields), play)


THREE = {"a": {"0": 60}, "b": {"0": 30}, "c": {"0": 50}}


def test_a_model_is_loaded_by_its_first_request_and_shows_its_states(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        stage.host.is_slow = True
        assert stage.status("a").state is ModelState.ABSENT
        waiting = asyncio.create_task(stage.ready("a"))
        await stage.later(2)
        assert stage.status("a").state is ModelState.LOADING and stage.status("a").queued == 1
        stage.host.finish("a")
        assert await waiting == ["a"] and stage.status("a").state is ModelState.IDLE
        replica = stage.status("a").replicas[0]
        with stage.fleet.using(replica):
            assert stage.status("a").state is ModelState.READY and stage.status("a").running == 1
        assert stage.status("a").held == {"cuda:0": 60} and stage.status("a").queued == 0
        assert stage.progress and stage.progress[0].state is ModelState.LOADING

    played(play, tmp_path, THREE)


def test_the_least_recently_used_idle_model_sleeps_and_wakes_again(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        await stage.request("a")
        await stage.later(5)
        await stage.request("b")
        await stage.later(5)
        waiting = asyncio.create_task(stage.ready("c"))
        await stage.later(3)
        assert await waiting == ["c"]
        assert stage.host.log == ["start a", "start b", "sleep a", "start c"]
        assert stage.status("a").state is ModelState.SLEEPING and stage.status("a").held == {"cuda:0": 2}
        assert stage.status("a").sleep_level == 1 and (stage.status("a").loads, stage.status("a").wakes) == (1, 0)
        await stage.later(5)
        waiting = asyncio.create_task(stage.ready("a"))
        await stage.later(5)
        assert await waiting == ["a"] and (stage.status("a").loads, stage.status("a").wakes) == (1, 1)
        assert stage.status("a").sleep_level == 0
        assert stage.host.log[4:] == ["sleep c", "wake a"], "b was used before c, but c alone suffices"

    stage = played(play, tmp_path, THREE)
    assert stage.host.used("0") <= TOTAL


def test_names_of_models_are_known_without_a_look_at_the_ledger(tmp_path: Path) -> None:
    """Each request asks for them."""

    async def play(stage: Stage) -> None:
        await stage.request("b")
        before = stage.host.looks
        assert list(stage.fleet.names()) == ["a", "b", "c"] and stage.host.looks == before
        assert [status.name for status in stage.fleet.models()] == ["a", "b", "c"] and stage.host.looks > before

    played(play, tmp_path, THREE)


def test_no_model_sleeps_beside_one_in_use_that_must_make_room_anyway(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        await stage.request("b")
        await stage.later(3)
        (replica,) = await stage.fleet.ready("c", stage.progress.append)
        with stage.fleet.using(replica):
            waiting = asyncio.create_task(stage.ready("a"))
            await stage.later(5)
            assert stage.host.log == ["start b", "start c"], "b is idle, but too small"
        await stage.later(3)
        assert await waiting == ["a"] and stage.host.log == ["start b", "start c", "sleep c", "start a"]

    played(play, tmp_path, THREE)


def test_what_is_slow_to_sleep_and_wake_makes_room_last(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        for name in ("slow", "fast"):
            await stage.request(name)
        await stage.later(4)
        now = stage.clock.now()
        for model in ("slow", "fast"):
            member = stage.fleet._models[model].members[0]
            member.slept_s, member.last_used = {"slow": 16.0, "fast": 1.0}[model], now - {"slow": 6, "fast": 3}[model]
        waiting = asyncio.create_task(stage.ready("more"))
        await stage.later(3)
        assert await waiting == ["more"] and stage.host.log[2:] == ["sleep fast", "start more"]

    played(play, tmp_path, {"slow": {"0": 40}, "fast": {"0": 40}, "more": {"0": 40}})


def test_a_model_that_has_just_come_stays_while_requests_follow_each_other(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        stage.host.is_slow = True
        first = asyncio.create_task(stage.ready("a"))
        await stage.later(8)
        stage.host.finish("a")
        stage.host.is_slow = False
        await first
        waiting = asyncio.create_task(stage.ready("c"))
        for _ in range(6):
            await stage.request("a")
            await stage.later(1)
        assert not waiting.done() and stage.host.log == ["start a"]
        await stage.later(4)
        assert await waiting == ["c"] and stage.host.log == ["start a", "sleep a", "start c"]

    played(play, tmp_path, THREE)


def test_a_wake_shows_its_progress_to_requests_and_operators(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        await stage.request("a")
        await stage.later(7)
        assert stage.status("a").state is ModelState.SLEEPING and stage.status("a").progress is None
        stage.host.may_wake = asyncio.Event()
        waiting = asyncio.create_task(stage.ready("a"))
        await stage.later(1)
        deployment = stage.host.deployments["a"]
        deployment.phase, deployment.done, deployment.total = "wake", 30, 120
        await stage.later(3)
        wake = LoadProgress(state=ModelState.LOADING, text="wake", share=0.25)
        assert stage.status("a").progress == wake == stage.progress[-1]
        stage.host.may_wake.set()
        await stage.later(2)
        assert await waiting == ["a"] and stage.status("a").progress is None

    played(play, tmp_path, THREE, a={"keep_text": "idle 5s"})


def test_an_idle_rule_puts_a_model_to_sleep_after_its_time_and_not_before(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        await stage.request("a")
        await stage.request("b")
        await stage.later(599)
        assert stage.status("a").state is ModelState.IDLE
        await stage.later(3)
        assert stage.status("a").state is ModelState.SLEEPING and stage.status("b").state is ModelState.IDLE

    played(play, tmp_path, THREE, a={"keep_text": "idle 10m"})


def test_a_pinned_model_is_loaded_from_the_start_and_never_sleeps(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        await stage.later(2)
        assert stage.status("a").state is ModelState.IDLE
        with pytest.raises(Unavailable) as refused:
            await stage.ready("c")
        assert refused.value.code == "no_memory" and refused.value.facts["holders"] == ["a"]
        assert refused.value.facts["retry_after_s"] >= 1 and "a holds" in refused.value.detail
        await stage.later(600)
        assert stage.host.log == ["start a"]

    played(play, tmp_path, THREE, a={"keep_text": "always"})


def test_requests_in_flight_keep_a_model_awake_until_the_other_has_waited_its_turn(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        (replica,) = await stage.fleet.ready("a", stage.progress.append)
        using = stage.fleet.using(replica)
        using.__enter__()
        waiting = asyncio.create_task(stage.ready("c"))
        await stage.later(8)
        assert not waiting.done() and "a holds" in stage.status("c").reason
        assert await stage.ready("a") == ["a"], "it takes requests until the other has waited its turn"
        await stage.later(4)
        more = asyncio.create_task(stage.ready("a"))
        await stage.later(4)
        assert not more.done(), "it makes room now"
        assert stage.host.log == ["start a"]
        using.__exit__(None, None, None)
        await stage.later(1)
        assert await waiting == ["c"] and stage.host.log == ["start a", "sleep a", "start c"]
        await stage.later(5)
        assert await more == ["a"], "then it comes back"

    played(play, tmp_path, THREE)


def test_a_deployment_that_runs_requests_of_others_is_not_put_to_sleep(tmp_path: Path) -> None:
    """Those of a second gateway, or of clients of the deployment's own port."""

    async def play(stage: Stage) -> None:
        await stage.request("a")
        stage.host.deployments["a"].running = 1
        await stage.later(4)
        waiting = asyncio.create_task(stage.ready("c"))
        await stage.later(5)
        assert not waiting.done() and stage.host.log == ["start a"]
        stage.host.deployments["a"].running = 0
        await stage.later(5)
        assert await waiting == ["c"]

    played(play, tmp_path, THREE)


def test_beyond_its_queue_a_loading_model_refuses_with_the_time_that_loads_take(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        stage.host.is_slow = True
        first = asyncio.create_task(stage.ready("a"))
        await stage.later(3)
        with pytest.raises(Unavailable) as refused:
            await stage.ready("a")
        assert refused.value.code == "queue_full" and refused.value.facts["retry_after_s"] == 27
        await stage.later(4)
        stage.host.finish("a")
        assert await first == ["a"]
        del stage.host.deployments["a"]
        await stage.later(2)
        second = asyncio.create_task(stage.ready("a"))
        await stage.later(2)
        with pytest.raises(Unavailable) as refused:
            await stage.ready("a")
        assert refused.value.facts["retry_after_s"] == 5, "the last load took 7 s"
        second.cancel()

    played(play, tmp_path, THREE, a={"max_queue": 1})


def test_a_failure_keeps_its_cause_and_is_retried_after_growing_pauses(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        stage.host.failures["a"] = [StartError("no weights", "the folder is empty", code="late") for _ in range(2)]
        for pause in (5, 10):
            with pytest.raises(Unavailable, match="a cannot serve: no weights") as refused:
                await stage.ready("a")
            assert refused.value.detail == "the folder is empty" and refused.value.facts["retry_after_s"] == pause
            assert stage.status("a").state is ModelState.FAILED and "no weights" in stage.status("a").reason
            starts = len(stage.host.log)
            with pytest.raises(Unavailable, match="no weights"):
                await stage.ready("a")
            assert len(stage.host.log) == starts, "nothing starts within the pause"
            await stage.later(pause)
        assert await stage.ready("a") == ["a"]

    played(play, tmp_path, THREE)


def test_a_model_that_can_never_fit_is_refused_before_anything_starts(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        with pytest.raises(Unavailable, match="huge can never fit") as refused:
            await stage.ready("huge")
        assert refused.value.facts["retry_after_s"] == 300 and refused.value.hint != "retry later"
        assert stage.host.log == []

    played(play, tmp_path, {"huge": {"0": TOTAL + 1}})


def test_copies_stay_on_the_host_after_a_wake_while_those_of_all_models_fit_there(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        for name in ("a", "b", "c"):
            await stage.request(name)
            await stage.later(15)
        kept = {name: entry.set.get("sleep_copies") for name, entry in stage.host.entries.items()}
        assert kept == {"a": True, "b": True, "c": None}, "95 of 100 bytes are those of a and b"
        assert "sleep a" in stage.host.log
        await stage.request("a")
        await stage.later(15)
        assert stage.host.log[-3:] == ["sleep c at level 2", "wake a", "sleep a"], "c has no room beside both copies"

    needs = {"a": {"0": 60}, "b": {"0": 35}, "c": {"0": 50}}
    idle = {"sleepable": True, "keep_text": "idle 10s"}
    memory = MemorySpec(host_text="100")
    played(play, tmp_path, needs, memory=memory, **dict.fromkeys(needs, idle))


def test_weights_that_the_host_cannot_keep_are_dropped_by_the_sleep(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        await stage.request("a")
        stage.host.free_memory = 100
        await stage.later(4)
        waiting = asyncio.create_task(stage.ready("c"))
        await stage.later(2)
        assert await waiting == ["c"] and stage.host.log == ["start a", "sleep a at level 2", "start c"]

    played(play, tmp_path, THREE)


def test_models_of_the_gateway_stay_below_its_own_limit(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        serve = ServeFile(models=stage.serve.models, discover=False, memory=MemorySpec(gpu_text="80"))
        await stage.fleet.apply(serve)
        await stage.request("a")
        await stage.later(4)
        waiting = asyncio.create_task(stage.ready("b"))
        await stage.later(2)
        assert await waiting == ["b"] and stage.host.log == ["start a", "sleep a", "start b"]

    played(play, tmp_path, THREE)


def test_a_model_that_cannot_sleep_ends(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        stage.host.cannot_sleep = {"a"}
        await stage.request("a")
        await stage.later(4)
        waiting = asyncio.create_task(stage.ready("c"))
        await stage.later(2)
        assert await waiting == ["c"] and stage.host.log == ["start a", "end a", "start c"]
        assert stage.status("a").state is ModelState.ABSENT

    played(play, tmp_path, THREE)


def test_a_model_that_cannot_sleep_is_known_before_its_first_request_and_ends_when_idle(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        await stage.later(1)
        assert stage.status("a").can_sleep is False and "sleepable: true" in stage.status("a").caution
        assert stage.status("b").can_sleep is True and not stage.status("b").caution
        assert stage.status("c").can_sleep is None, "nothing needs its plan yet"
        await stage.request("a")
        await stage.later(12)
        assert stage.host.log == ["start a", "end a"], "no sleep is tried"
        assert stage.status("a").state is ModelState.ABSENT

    host = FakeHost(THREE, unplaced={"a"})
    own = {"file": "own.yaml"}  # the file decides
    idle = {**own, "keep_text": "idle 10s"}
    played(play, tmp_path, THREE, host, a=idle, b=idle, c=own)


def test_a_changed_default_of_all_models_replaces_their_deployments(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        await stage.request("a")
        await stage.fleet.apply(ServeFile(models=stage.serve.models, discover=False, sleepable=False))
        await stage.later(2)
        assert stage.host.log == ["start a", "replace a"] and stage.host.entries["a"].sleepable is False

    played(play, tmp_path, {"a": {"0": 40}})


def test_sleepers_end_where_even_their_rest_is_needed(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        await stage.request("a")
        await stage.later(4)
        waiting = asyncio.create_task(stage.ready("all"))
        await stage.later(2)
        assert await waiting == ["all"] and stage.host.log == ["start a", "sleep a", "end a", "start all"]

    played(play, tmp_path, {"a": {"0": 60}, "all": {"0": TOTAL}})


def test_models_without_a_budget_take_turns_on_a_whole_gpu(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        await stage.request("a")
        await stage.later(4)
        waiting = asyncio.create_task(stage.ready("b"))
        await stage.later(2)
        assert await waiting == ["b"] and stage.host.log == ["start a", "end a", "start b"]

    needs = {"a": {"0": TOTAL}, "b": {"0": TOTAL}}
    played(play, tmp_path, needs, FakeHost(needs, is_shared=False))


def test_the_next_gateway_adopts_what_runs_and_ends_only_what_gateways_started(tmp_path: Path) -> None:
    async def first(stage: Stage) -> None:
        await stage.request("a")

    host = played(first, tmp_path, THREE).host
    host.adopt("b", "b")

    async def second(stage: Stage) -> None:
        assert stage.status("a").state is ModelState.IDLE and stage.status("b").state is ModelState.IDLE
        assert await stage.ready("b") == ["b"]
        await stage.fleet.close(is_final=True)

    played(second, tmp_path, THREE, host)
    assert host.log == ["start a", "end a"] and set(host.deployments) == {"b"}


def test_a_name_whose_deployment_has_ended_may_be_an_operators_next(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        await stage.request("a")
        await stage.later(8)
        assert stage.host.log == ["start a", "end a"]
        stage.host.adopt("a", "a")
        await stage.later(2)
        assert stage.status("a").state is ModelState.IDLE
        await stage.fleet.close(is_final=True)
        assert set(stage.host.deployments) == {"a"}, "the gateway ends only what it has started"

    played(play, tmp_path, THREE, FakeHost(THREE, unplaced={"a"}), a={"keep_text": "idle 5s"})


@pytest.mark.parametrize("is_placed", [True, False])
def test_a_killed_gateway_leaves_no_claim_on_a_later_deployment_of_the_name(is_placed: bool, tmp_path: Path) -> None:
    """It is killed after the end of its deployment, or during a start that then fails."""

    async def first(stage: Stage) -> None:
        stage.host.is_slow = not is_placed
        waiting = asyncio.create_task(stage.ready("a"))
        await stage.later(2)
        waiting.cancel()

    host = played(first, tmp_path, THREE).host
    del host.deployments["a"]
    host.adopt("a", "a")

    async def second(stage: Stage) -> None:
        assert await stage.ready("a") == ["a"]
        await stage.fleet.close(is_final=True)

    played(second, tmp_path, THREE, host)
    assert set(host.deployments) == {"a"} and host.log == ["start a"], "an operator's deployment stays"


def test_a_deployment_that_an_operator_starts_in_place_of_one_that_ended_is_not_the_gateways(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        await stage.request("a")
        await stage.later(2)
        del stage.host.deployments["a"]
        stage.host.adopt("a", "a")
        await stage.later(2)
        await stage.fleet.close(is_final=True)
        assert set(stage.host.deployments) == {"a"}

    played(play, tmp_path, THREE)


def test_a_successor_of_the_gateways_own_deployment_is_its_own_too(tmp_path: Path) -> None:
    needs = {"a": {"0": 40}}

    async def first(stage: Stage) -> None:
        await stage.request("a")
        entries = {**stage.serve.models, "a": ModelEntry(target="a", name="a", set={"max_queue": 7})}
        await stage.fleet.apply(ServeFile(models=entries, discover=False))
        await stage.later(3)
        assert stage.host.log == ["start a", "replace a"]

    host = played(first, tmp_path, needs).host

    async def second(stage: Stage) -> None:
        await stage.fleet.close(is_final=True)

    played(second, tmp_path, needs, host)
    assert host.deployments == {}


def test_a_successor_that_a_killed_gateway_has_left_is_known_by_the_next_one(tmp_path: Path) -> None:
    """Its record has the token of the gateways of this folder."""
    owner = owner_token(tmp_path / "state")
    host = FakeHost(THREE)
    host.adopt("a", "a").owner = owner
    host.adopt("b", "b")

    async def next_one(stage: Stage) -> None:
        await stage.fleet.close(is_final=True)

    played(next_one, tmp_path, THREE, host)
    assert set(host.deployments) == {"b"} and host.log == ["end a"]


def test_the_next_gateway_knows_the_copies_that_deployments_keep_on_the_host(tmp_path: Path) -> None:
    needs = {key: {"0": 40} for key in "abc"}
    host, memory = FakeHost(needs), MemorySpec(host_text="85")
    host.adopt("a", "a").sleep_copies = True
    asleep = host.adopt("b", "b", state="sleeping")
    asleep.level, asleep.held = 1, {"0": 2}

    async def play(stage: Stage) -> None:
        await stage.request("c")
        await stage.later(15)
        assert host.log == ["start c", "sleep c at level 2"], "80 of 85 bytes are those of a and b"
        assert stage.host.entries["c"].set.get("sleep_copies") is None

    idle = {"c": {"keep_text": "idle 10s", "sleepable": True}}
    played(play, tmp_path, needs, host, memory=memory, **idle)


def test_a_small_model_that_fits_passes_a_large_one_that_waits_for_room_twice_at_most(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        (replica,) = await stage.fleet.ready("a", stage.progress.append)
        with stage.fleet.using(replica):
            large = asyncio.create_task(stage.ready("large"))
            await stage.later(2)
            assert stage.status("large").reason == "waits for memory that a holds"
            assert await stage.ready("s1") == ["s1"] and await stage.ready("s2") == ["s2"] and not large.done()
            third = asyncio.create_task(stage.ready("s3"))
            await stage.later(6)
            assert not third.done() and stage.status("s3").reason == "waits behind large"
        await stage.later(10)
        assert await large == ["large"] and await third == ["s3"]
        log = stage.host.log
        assert log[:3] == ["start a", "start s1", "start s2"] and log.index("start large") < log.index("start s3")

    needs = {"a": {"0": 60}, "large": {"0": 90}, **{f"s{number}": {"0": 10} for number in (1, 2, 3)}}
    stage = played(play, tmp_path, needs)
    assert stage.host.used("0") <= TOTAL


def test_a_small_model_that_does_not_fit_waits_its_turn(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        (replica,) = await stage.fleet.ready("a", stage.progress.append)
        with stage.fleet.using(replica):
            both = [asyncio.create_task(stage.ready(name)) for name in ("large", "small")]
            await stage.later(4)
            assert stage.status("small").reason == "waits behind large" and stage.host.log == ["start a"]
        await stage.later(8)
        assert [await each for each in both] == [["large"], ["small"]]
        assert stage.host.log == ["start a", "sleep a", "start large", "sleep large", "start small"]

    played(play, tmp_path, {"a": {"0": 60}, "large": {"0": 90}, "small": {"0": 50}})


def test_two_models_that_each_hold_what_the_other_needs_do_not_wait_for_each_other(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        await stage.request("left")
        await stage.request("right")
        await stage.later(4)
        both = [asyncio.create_task(stage.ready(name)) for name in ("wide", "broad")]
        await stage.later(40)
        assert [await each for each in both] == [["wide"], ["broad"]]

    needs = {"left": {"0": 60}, "right": {"1": 60}, "wide": {"0": 60, "1": 60}, "broad": {"1": 70, "0": 70}}
    stage = played(play, tmp_path, needs)
    assert max(stage.host.used("0"), stage.host.used("1")) <= TOTAL


def test_replicas_follow_the_queue_within_their_bounds_and_with_pauses(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        await stage.request("a")
        host = stage.host
        host.deployments["a"].waiting = host.deployments["a"].running = 3
        await stage.later(28)
        assert sorted(host.deployments) == ["a"], "the pause after the start"
        await stage.later(8)
        assert await stage.ready("a") == ["a", "a-2"]
        host.deployments["a-2"].waiting = host.deployments["a-2"].running = 1
        await stage.later(300)
        assert sorted(host.deployments) == ["a", "a-2", "a-3"], "never above the bound"
        for deployment in host.deployments.values():
            deployment.running = deployment.waiting = 0
        await stage.later(125)
        assert sorted(host.deployments) == ["a", "a-2"]
        await stage.later(1000)
        assert sorted(host.deployments) == ["a"]

    played(play, tmp_path, {"a": {"0": 30}}, a={"replicas_text": "1..3"})


def test_a_changed_entry_replaces_its_deployment_while_others_serve(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        await stage.request("a")
        await stage.request("b")
        entries = dict(stage.serve.models)
        entries["a"] = ModelEntry(target="a", name="a", set={"max_queue": 7})
        del entries["c"]
        await stage.fleet.apply(ServeFile(models=entries, discover=False))
        await stage.later(3)
        assert stage.host.log == ["start a", "start b", "replace a"]
        assert await stage.ready("a") == ["a"] and await stage.ready("b") == ["b"]
        assert stage.fleet.resolve("c") is None
        entries["a"] = ModelEntry(target="a", name="a", set={"max_queue": 8})
        stage.host.adopt("other", "c")
        await stage.fleet.apply(ServeFile(models=entries, discover=False))
        await stage.later(3)
        assert stage.host.log[3:] == [], "there is no room for both, and no other model sleeps in vain"
        assert await stage.ready("a") == ["a"]

    played(play, tmp_path, {"a": {"0": 30}, "b": {"0": 20}, "c": {"0": 45}})


def test_a_wake_by_another_gateway_is_followed(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        await stage.request("a")
        await stage.later(7)
        assert stage.status("a").state is ModelState.SLEEPING
        stage.host.woken_by_others = {"a"}
        waiting = asyncio.create_task(stage.ready("a"))
        await stage.later(3)
        assert await waiting == ["a"] and stage.host.log == ["start a", "sleep a"]

    played(play, tmp_path, THREE, a={"keep_text": "idle 5s"})


def test_a_failed_deployment_is_started_again_and_that_of_an_operator_is_named(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        await stage.request("a")
        stage.host.deployments["a"].state = "unhealthy"
        stage.host.adopt("b", "b", state="unhealthy")
        await stage.later(2)
        assert await stage.ready("a") == ["a"] and stage.host.log == ["start a", "end a", "start a"]
        with pytest.raises(Unavailable, match="this gateway has not started it"):
            await stage.ready("b")

    played(play, tmp_path, THREE)


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_never_exceeds_a_device_nor_stops(seed: int, tmp_path: Path) -> None:
    """Each request is answered, or refused with a reason, and no device holds more than it has."""
    random = Random(seed)
    names = [f"m{number}" for number in range(5)]
    needs = {
        name: {key: random.randint(20, 70) for key in random.sample(["0", "1"], random.randint(1, 2))} for name in names
    }
    ends: list[str] = []

    async def play(stage: Stage) -> None:
        async def client(random: Random) -> None:
            for _ in range(6):
                await asyncio.sleep(0)
                model = random.choice(names)
                try:
                    replicas = await stage.fleet.ready(model, stage.progress.append)
                except MstarError as error:
                    assert error.facts.get("holders") or error.detail, error
                    ends.append(error.code)
                    continue
                with stage.fleet.using(random.choice(replicas)):
                    await stage.clock.wait(asyncio.Event(), random.random() * 4)
                    assert stage.host.deployments[replicas[0].deployment].state == "ready", "asleep below a request"
                ends.append("done")

        clients = [asyncio.create_task(client(Random(f"{seed}-{number}"))) for number in range(4)]
        for _ in range(2000):
            await stage.clock.advance(1)
            assert all(stage.host.used(key) <= TOTAL for key in "01")
            if all(each.done() for each in clients):
                break
        await asyncio.gather(*clients)

    played(play, tmp_path, needs)
    assert len(ends) == 24 and ends.count("done") > 12, ends


def test_settling_is_enough_for_the_fakes() -> None:
    """The scenes rely on `settle` to run everything that is due."""
    order: list[str] = []

    async def steps() -> None:
        for word in "abc":
            await asyncio.sleep(0)
            order.append(word)

    async def run() -> Sequence[str]:
        task = asyncio.create_task(steps())
        await settle()
        assert task.done()
        return order

    assert asyncio.run(run()) == ["a", "b", "c"]
