"""Process pool: isolation of crashes, time limits, and no process left behind."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from mstar_core.api.preprocess.child import Answer, JobCall
from mstar_core.api.preprocess.pool import CORES_EACH, Pool
from mstar_core.api.preprocess.process import MakeProcess, Note, ProcessorProcess
from mstar_core.errors import BadMedia, PluginError, RequestError
from mstar_core.plugin.processor import Inputs, PromptRequest

TARGET = "tests.fakes.speech_model:Processor"
SLOW = "tests.fakes.slow_start:Processor"
LIMIT_S = 60.0
JOB_S = 0.5
"""Time limit of jobs that hang. Others have none in `Patient`."""


class Patient(ProcessorProcess):
    """The real process, whose time limit ends only jobs that hang: a busy machine may delay the others for long."""

    hangs = False

    def send(self, calls: Sequence[JobCall]) -> None:
        self.hangs = any(isinstance(args[0], PromptRequest) and args[0].text == "hang" for _, args in calls)
        super().send(calls)

    def kill(self) -> None:
        if self.hangs or self._is_ending:
            super().kill()

    def stop(self) -> None:
        self.hangs = True
        super().stop()


class Counted(Patient):
    """The patient process. starts: number of starts since the test reset it."""

    starts = 0

    def start(self) -> None:
        Counted.starts += 1
        super().start()


class Unreadable(ProcessorProcess):
    """The real process, whose first answer cannot be read."""

    reads = 0

    def load(self, note: Note, calls: Sequence[JobCall]) -> list[Answer]:
        found = super().load(note, calls)
        self.reads += 1
        if self.reads == 1:
            raise ValueError("unreadable")
        return found


@asynccontextmanager
async def pool_of(
    size: int = 1,
    job_s: float = 60.0,
    jobs: int = 500,
    target: str = TARGET,
    make: MakeProcess = ProcessorProcess,
    **model_kwargs: str,
) -> AsyncIterator[Pool]:
    pool = Pool(target, None, model_kwargs, size=size, job_s=job_s, jobs=jobs, make=make)
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


def children() -> set[int]:
    """Return the processes of pools that threads of this one have started and that run."""
    found = set()
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in path.read_text().split():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text():
                    found.add(int(pid))
    return found


async def test_errors_come_back_as_they_are_and_others_as_ours() -> None:
    async with pool_of() as pool:
        with pytest.raises(RequestError) as long:
            await pool.prompt(PromptRequest(text="x" * 1001))
        assert (long.value.field, long.value.code) == ("text", "context_length_exceeded")
        with pytest.raises(PluginError):
            await pool.prompt(PromptRequest(text="raise"))
        (pid,) = pool.pids
        with pytest.raises(PluginError):
            await pool.prompt(PromptRequest(text="unsendable"))
        assert pool.pids == [pid], "it works on"
        assert (await pool.prompt(PromptRequest(text="abc"))).prompt_tokens == 3


async def test_an_answer_that_cannot_be_read_fails_its_job_alone() -> None:
    async with pool_of(make=Unreadable) as pool:
        with pytest.raises(ValueError, match="unreadable"):
            await pool.prompt(PromptRequest(text="abc"))
        assert pool.busy == 0
        assert (await pool.prompt(PromptRequest(text="abc"))).prompt_tokens == 3


async def test_a_job_that_takes_too_long_is_ended_and_the_pool_goes_on() -> None:
    async with pool_of(job_s=JOB_S) as pool:
        with pytest.raises(BadMedia):
            await pool.prompt(PromptRequest(text="hang"))
        assert pool.busy == 0
    async with pool_of() as pool:
        (pid,) = pool.pids
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert (await pool.prompt(PromptRequest(text="abc"))).prompt_tokens == 3


async def test_files_that_wait_start_more_processes_up_to_a_share_of_the_cores() -> None:
    pool = Pool(TARGET, None, {}, size=None, cores=2 * CORES_EACH)
    try:
        await pool.start()
        await asyncio.gather(*(pool.prompt(PromptRequest(text="abc")) for _ in range(5)))
        assert len(pool.pids) == 1, "short prompts wait for milliseconds"
        large = PromptRequest(text="x" * 20_000)
        async with asyncio.timeout(LIMIT_S):
            while len(pool.pids) == 1:
                await asyncio.gather(*(pool.prompt(large) for _ in range(4)), return_exceptions=True)
        await asyncio.gather(*(pool.prompt(large) for _ in range(8)), return_exceptions=True)
        pids = pool.pids
        assert len(set(pids)) == 2 and pool.busy == 0
        assert (await pool.prompt(PromptRequest(text="abc"))).prompt_tokens == 3
    finally:
        await pool.close()
    assert not any(map(is_alive, pids))


def libraries_of(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


async def test_a_pool_for_media_grows_without_a_request_and_has_its_decoders_loaded() -> None:
    pool = Pool(TARGET, None, {}, size=None, cores=4 * CORES_EACH, media=("image", "audio", "other"))
    try:
        await pool.start()
        async with asyncio.timeout(LIMIT_S):
            while len(pool.pids) < 2:
                assert (await pool.prompt(PromptRequest(text="abc"))).prompt_tokens == 3
                await asyncio.sleep(0.02)
            while pool.busy:
                assert (await pool.prompt(PromptRequest(text="abc"))).prompt_tokens == 3
                await asyncio.sleep(0.02)
        pids = pool.pids
        for loaded in map(libraries_of, pids):
            assert "PIL/_imaging" in loaded and "libsndfile" in loaded and "soxr" in loaded
        assert (await pool.prompt(PromptRequest(text="abc"))).prompt_tokens == 3
    finally:
        await pool.close()
    assert not any(map(is_alive, pids))


class Gate:
    """Processes of the slow target can start while it is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.open()

    def open(self) -> None:
        self.path.touch()

    def close(self) -> None:
        self.path.unlink()


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """Return an open gate."""
    return Gate(tmp_path / "gate")


async def test_nobody_waits_while_a_process_is_replaced(gate: Gate) -> None:
    async with pool_of(target=SLOW, jobs=5, gate=str(gate.path)) as pool:
        (first,) = pool.pids
        gate.close()
        async with asyncio.timeout(LIMIT_S):
            for _ in range(30):  # the fifth requests a successor, which cannot start
                assert (await pool.prompt(PromptRequest(text="abc"))).prompt_tokens == 3
            assert pool.pids == [first]
            gate.open()
            while pool.pids == [first]:
                assert (await pool.prompt(PromptRequest(text="abc"))).prompt_tokens == 3
                await asyncio.sleep(0.02)
            while is_alive(first):  # noqa: ASYNC110 a process that left the pool has no event for tests
                await asyncio.sleep(0.02)
        pids = pool.pids
    assert not any(is_alive(pid) for pid in pids)


async def test_a_pool_that_closes_ends_the_process_that_is_being_started(gate: Gate) -> None:
    before = children()  # other tests keep some
    async with pool_of(target=SLOW, jobs=1, gate=str(gate.path)) as pool:
        gate.close()
        await pool.prompt(PromptRequest(text="abc"))
    assert children() <= before


async def test_a_caller_that_goes_away_leaves_its_process_to_the_others() -> None:
    async with pool_of(size=2) as pool:
        gone = asyncio.create_task(pool.prompt(PromptRequest(text="hang")))
        async with asyncio.timeout(LIMIT_S):
            while not pool.busy:  # noqa: ASYNC110 the start of a job has no event for tests
                await asyncio.sleep(0.002)
        gone.cancel()
        assert (await pool.prompt(PromptRequest(text="abc"))).prompt_tokens == 3
        pids = pool.pids
    assert not any(is_alive(pid) for pid in pids)


async def test_jobs_that_wait_go_together_and_one_that_kills_the_process_fails_alone() -> None:
    async with pool_of(job_s=JOB_S, make=Patient) as pool:
        texts = ["abc"] * 4 + ["hang"] + ["abc"] * 4 + ["raise", "x" * 20_000, "abc"]
        found = await asyncio.gather(*(pool.prompt(PromptRequest(text=text)) for text in texts), return_exceptions=True)
        kinds = [type(each) for each in found]
        assert kinds == [Inputs] * 4 + [BadMedia] + [Inputs] * 4 + [PluginError, RequestError, Inputs]
        assert pool.busy == 0


async def test_those_who_left_hold_a_neighbour_up_for_one_job_at_most() -> None:
    Counted.starts = 0
    async with pool_of(job_s=JOB_S, make=Counted) as pool:
        gone = [asyncio.create_task(pool.prompt(PromptRequest(text=text))) for text in ("abc", *("hang",) * 8)]
        await gone[0]  # the others were sent in the next message, or wait
        for task in gone[1:]:
            task.cancel()
        for _ in range(2):
            assert (await pool.prompt(PromptRequest(text="abc"))).prompt_tokens == 3
        assert Counted.starts == 2, "one job that hung was begun, and ended"


async def test_a_processor_that_cannot_be_made_is_a_failed_start() -> None:
    pool = Pool("tests.fakes.speech_model:Missing", None, {})
    with pytest.raises(PluginError):
        await pool.start()
    await pool.close()


HOLDER = f"""
import asyncio
from mstar_core.api.preprocess.child import Answer, JobCall
from mstar_core.api.preprocess.pool import CORES_EACH, Pool

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
        assert select.select([watch], [], [], LIMIT_S)[0]
        os.close(watch)
