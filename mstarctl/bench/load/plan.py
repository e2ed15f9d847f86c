"""Plan of a run: all requests drawn and encoded, with their times, dealt to the client processes.

Bodies are encoded before the first request, into one file that the clients map.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import UsageError
from mstar_core.workloads import ServedModel, WorkloadRequest
from mstarctl.bench.client.protocols import encode
from mstarctl.bench.client.wire import Job, Phase
from mstarctl.bench.load.arrivals import Arrivals, replayed, schedule
from mstarctl.bench.load.workloads import Workload, check_inputs, hash_of
from mstarctl.output.units import counted

WARM_UP, MEASURED = 0, 1
"""Numbers of the phases."""

WARM_UP_REQUESTS: Final = 20
CLOSED_BODIES: Final = 256
"""Requests drawn for a closed loop that lasts a time; they are repeated when they are used up."""

MOST_PLANNED: Final = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load of one run. Exactly one of `rate`, `concurrency` and `is_trace`; one of `requests` and `span_s`.

    warm_up_s: time after which the warm-up sends no more requests; 0 sends all `warm_up`.
    """

    rate: float | None = None
    arrivals: str = "poisson"
    concurrency: int | None = None
    is_trace: bool = False
    speed: float = 1.0
    requests: int | None = None
    span_s: float | None = None
    warm_up: int = WARM_UP_REQUESTS
    warm_up_s: float = 0.0
    ramp_s: float = 0.0
    think_s: float = 0.0
    period_s: float = 0.0
    seed: int = 0
    cancel_share: float = 0.0
    cancel_after_s: float = 0.0

    @property
    def is_open(self) -> bool:
        return self.concurrency is None

    def __str__(self) -> str:
        if self.is_trace:
            return f"trace at {self.speed:g}x"
        if self.concurrency is not None:
            every = f", every {1e3 * self.period_s:g} ms" if self.period_s else ""
            return f"{counted(self.concurrency, 'client')}{every}"
        assert self.rate is not None
        return str(Arrivals.parse(self.arrivals, self.rate))

    def facts(self) -> dict[str, Any]:
        """Return the load for the result file."""
        return {
            "kind": "trace" if self.is_trace else "open" if self.is_open else "closed",
            "rate": self.rate,
            "arrivals": self.arrivals if self.rate else None,
            "concurrency": self.concurrency,
            "speed": self.speed,
            "requests": self.requests,
            "span_s": self.span_s,
            "warm_up": self.warm_up,
            "warm_up_s": self.warm_up_s,
            "ramp_s": self.ramp_s,
            "think_s": self.think_s,
            "period_s": self.period_s,
            "cancel_share": self.cancel_share,
            "cancel_after_s": self.cancel_after_s,
        }


@dataclass(slots=True)
class RunPlan:
    """Everything that is sent. phases[client][phase]. asked: facts of each request by index, for the records.

    span_s: length of the measured window, 0 if the requests decide. hash: of the requests.
    """

    bodies: Path
    phases: list[list[Phase]]
    asked: list[dict[str, Any]]
    span_s: float
    hash: str
    total: int
    ramp_s: float
    prefix: str
    warnings: list[str] = field(default_factory=list)


def make_plan(
    load: Load, workload: Workload, card: ServedModel, *, protocol: str, processes: int, bodies: Path, prefix: str
) -> RunPlan:
    """Draw, encode and deal every request. Raises UsageError for a load that cannot be planned."""
    times = measured_times(load, workload, card)
    count = len(times) if times else load.requests or CLOSED_BODIES * max(1, (load.concurrency or 1) // 16)
    if count > MOST_PLANNED:
        raise UsageError(f"the run has {count} requests", hint=f"at most {MOST_PLANNED} are planned")
    requests = workload.requests(card, load.seed, load.warm_up + count)
    check_inputs(card, requests)
    plan = RunPlan(
        bodies=bodies,
        phases=[],
        asked=[],
        span_s=_span(load, times),
        hash=hash_of(requests[load.warm_up :]),
        total=count,
        ramp_s=load.ramp_s,
        prefix=prefix,
    )
    jobs = _encoded(plan, requests, load, card, protocol)
    warm_due = _warm_times(load)
    warm = [_due(job, at) for job, at in zip(jobs[: load.warm_up], warm_due, strict=True)]
    measured = [_due(job, at) for job, at in zip(jobs[load.warm_up :], times or [-1.0] * count, strict=True)]
    for process in range(processes):
        clients = _dealt(load.concurrency, process, processes)
        phases = [
            _phase(load, warm[process::processes], clients, 0.0, load.warm_up_s),
            _phase(load, measured[process::processes], clients, load.span_s),
        ]
        plan.phases.append(phases)
    if load.is_trace and not workload.is_timed:
        raise UsageError("the trace has requests without a time", hint='give each line "t", in seconds')
    return plan


def measured_times(load: Load, workload: Workload, card: ServedModel) -> list[float]:
    """Return the intended times of an open load or a trace; empty for a closed loop."""
    if load.is_trace:
        requests = workload.requests(card, load.seed, workload.size)
        times = replayed([request.at_s or 0.0 for request in requests], load.speed)
        times = times[: load.requests] if load.requests else times
        return [at for at in times if load.span_s is None or at < load.span_s]
    if load.rate is None:
        return []
    arrivals = Arrivals.parse(load.arrivals, load.rate)
    times = schedule(arrivals, load.seed, count=load.requests, span_s=load.span_s, ramp_s=load.ramp_s)
    if not times:
        raise UsageError(f"no request is due within {load.span_s:g} s at {load.rate:g}/s", hint="measure for longer")
    return times


def _warm_times(load: Load) -> list[float]:
    """Return the times of the warm-up, which has the load of the run: a burst would leave a queue."""
    if load.rate is None:
        return [-1.0] * load.warm_up if not load.is_trace else [0.05 * number for number in range(load.warm_up)]
    return schedule(Arrivals.parse(load.arrivals, load.rate), load.seed + 1, count=load.warm_up)


def _span(load: Load, times: Sequence[float]) -> float:
    if load.span_s is not None:
        return load.span_s
    return 0.0 if not times else times[-1] - load.ramp_s + (1 / load.rate if load.rate else 0.0)


def _encoded(
    plan: RunPlan, requests: Sequence[WorkloadRequest], load: Load, card: ServedModel, protocol: str
) -> list[Job]:
    chance = random.Random(f"cancel/{load.seed}")
    jobs, offset = [], 0
    with plan.bodies.open("wb") as file:
        for index, request in enumerate(requests):
            wire = encode(request, protocol, card)
            file.write(wire.body)
            leaves = load.cancel_after_s if chance.random() < load.cancel_share else 0.0
            number = index - load.warm_up
            name = f"{plan.prefix}w{index}" if number < 0 else f"{plan.prefix}{number}"
            jobs.append(
                Job(index, -1.0, wire.path, wire.content_type, wire.accept, name, offset, len(wire.body), leaves)
            )
            plan.asked.append({"outputs": list(request.outputs), "expected": dict(request.expected)})
            offset += len(wire.body)
    return jobs


def _due(job: Job, at_s: float) -> Job:
    return Job(
        job.index,
        at_s,
        job.path,
        job.content_type,
        job.accept,
        job.request_id,
        job.offset,
        job.size_bytes,
        job.cancel_after_s,
    )


def _dealt(clients: int | None, process: int, processes: int) -> int:
    return 0 if clients is None else clients // processes + (process < clients % processes)


def _phase(load: Load, jobs: list[Job], clients: int, span_s: float | None, limit_s: float = 0.0) -> Phase:
    return Phase(
        jobs=jobs,
        clients=clients,
        think_s=load.think_s,
        period_s=load.period_s if clients else 0.0,
        span_s=(span_s or 0.0) if clients else 0.0,
        limit_s=limit_s,
    )
