"""The pool of processor processes: isolation of crashes, limits of time, and no process left behind."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from mstar_core.api.pool import Pool
from mstar_core.errors import BadMedia, PluginError, RequestError
from mstar_core.plugin.processor import Inputs, PromptRequest
from tests.fakes.slow_start import START_S

TARGET = "tests.fakes.speech_model:Processor"


@asynccontextmanager
async def pool_of(size: int = 1, job_s: float = 60.0, jobs: int = 500, target: str = TARGET) -> AsyncIterator[Pool]:
    pool = Pool(target, None, {}, size=size, job_s=job_s, jobs=jobs)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children() -> list[str]:
    """Command lines of the processes that this one started, from any of its threads."""
    lists = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    return [Path(f"/proc/{pid}/cmdline").read_text() for pids in lists for pid in pids]


async def start_s() -> float:
    """How long a process takes to start here and now."""
    begun = time.monotonic()
    async with pool_of():
        return time.monotonic() - begun + START_S


async def test_errors_come_back_as_they_are_and_others_as_ours() -> None:
    async with pool_of() as pool:
        with pytest.raises(RequestError) as long:
            await pool.prompt(PromptRequest(text="x" * 1001))
        assert (long.value.field, long.value.code) == ("text", "context_length_exceeded")
        with pytest.raises(PluginError):
            await pool.prompt(PromptRequest(text="raise"))
        assert (await pool.prompt(PromptRequest(text="abc"))).prompt_tokens == 3


async def test_a_job_that_takes_too_long_is_ended_and_the_pool_goes_on() -> None:
    async with pool_of(job_s=0.2) as pool:
        with pytest.raises(BadMedia):
            await pool.prompt(PromptRequest(text="hang"))
        assert pool.busy == 0
    async with pool_of() as pool:
        (pid,) = pool.pids
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert (await pool.prompt(PromptRequest(text="abc"))).prompt_tokens == 3


async def test_nobody_waits_while_a_process_is_replaced() -> None:
    async with pool_of(target="tests.fakes.slow_start:Processor", jobs=5) as pool:
        waits, pids = [], set(pool.pids)
        async with asyncio.timeout(60):
            while len(pids) < 3:
                begun = time.monotonic()
                assert (await pool.prompt(PromptRequest(text="abc"))).prompt_tokens == 3
                waits.append(time.monotonic() - begun)
                pids |= set(pool.pids)
                await asyncio.sleep(0.02)
        assert max(waits) < START_S, "a start takes longer than any job did"
        assert sum(is_alive(pid) for pid in pids) <= 2
    assert not any(is_alive(pid) for pid in pids)


async def test_a_pool_that_closes_ends_the_process_that_is_being_started() -> None:
    before = sum("spawn_main" in command for command in children())  # other tests keep some
    async with pool_of(target="tests.fakes.slow_start:Processor", jobs=1) as pool:
        await pool.prompt(PromptRequest(text="abc"))
        begun = time.monotonic()
    assert time.monotonic() - begun < 20
    assert sum("spawn_main" in command for command in children()) == before


async def test_a_caller_that_goes_away_leaves_its_process_to_the_others() -> None:
    async with pool_of(size=2) as pool:
        gone = asyncio.create_task(pool.prompt(PromptRequest(text="hang")))
        async with asyncio.timeout(20):
            while not pool.busy:  # noqa: ASYNC110  a job's start has no event for tests
                await asyncio.sleep(0.002)
        gone.cancel()
        assert (await pool.prompt(PromptRequest(text="abc"))).prompt_tokens == 3
        pids = pool.pids
    assert not any(is_alive(pid) for pid in pids)


async def test_jobs_that_wait_go_together_and_one_that_kills_the_process_fails_alone() -> None:
    async with pool_of(job_s=1.0) as pool:
        texts = ["abc"] * 4 + ["hang"] + ["abc"] * 4 + ["raise", "x" * 20_000, "abc"]
        found = await asyncio.gather(*(pool.prompt(PromptRequest(text=text)) for text in texts), return_exceptions=True)
        kinds = [type(each) for each in found]
        assert kinds == [Inputs] * 4 + [BadMedia] + [Inputs] * 4 + [PluginError, RequestError, Inputs]
        assert pool.busy == 0


async def test_those_who_left_hold_a_neighbour_up_for_one_job_at_most() -> None:
    job_s = 0.5
    async with pool_of(job_s=job_s) as pool:
        (first,) = pool.pids
        gone = [asyncio.create_task(pool.prompt(PromptRequest(text=text))) for text in ("abc", *("hang",) * 8)]
        await gone[0]  # the others were handed over with it, or wait behind
        for task in gone[1:]:
            task.cancel()
        begun = time.monotonic()
        neighbour = await pool.prompt(PromptRequest(text="abc"))
        waited_s = time.monotonic() - begun
        assert neighbour.prompt_tokens == 3
        assert pool.pids != [first], "the job that hung was ended"
        restarted = time.monotonic()
        await pool.prompt(PromptRequest(text="abc"))
        assert time.monotonic() - restarted < job_s
    assert waited_s < 2 * job_s + await start_s()


async def test_a_processor_that_cannot_be_made_is_a_failed_start() -> None:
    pool = Pool("tests.fakes.speech_model:Missing", None, {})
    with pytest.raises(PluginError):
        await pool.start()
    await pool.close()


HOLDER = f"""
import asyncio
from mstar_core.api.pool import Pool

async def hold():
    pool = Pool({TARGET!r}, None, {{}})
    await pool.start()
    print(*pool.pids, flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(hold())
"""


def test_pool_processes_die_with_an_api_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "holder.py"
    script.write_text(HOLDER)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment) as holder:
        assert holder.stdout is not None
        pid = int(holder.stdout.readline())
        assert is_alive(pid)
        watch = os.pidfd_open(pid)
        holder.kill()
        assert select.select([watch], [], [], 20)[0]
        os.close(watch)
