"""One run: plans the load, drives the client processes, collects their records, and writes the result."""

from __future__ import annotations

import json
import math
import secrets
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from mstar_core.errors import ExitCode, MstarError, TimedOut
from mstarctl.bench import result
from mstarctl.bench.client.wire import ClientPlan, Counters, PhaseEnd, Record
from mstarctl.bench.crew import Crew
from mstarctl.bench.environment import environment, last_ceiling
from mstarctl.bench.load.plan import MEASURED, WARM_UP, Load, RunPlan, make_plan
from mstarctl.bench.load.workloads import Workload
from mstarctl.bench.measure.incidents import failures, incidents, outages
from mstarctl.bench.measure.load_metrics import Measures
from mstarctl.bench.measure.outcome import Outcome
from mstarctl.bench.measure.shares import joined, slow_and_usual
from mstarctl.bench.measure.terms import Judged, Term, judge
from mstarctl.bench.measure.tokens import TokenCounter
from mstarctl.bench.measure.window import MeasuredWindow, summarised, window_of
from mstarctl.bench.recorder import RunRecorder
from mstarctl.bench.server_side import ServerSide
from mstarctl.bench.show.display import Display
from mstarctl.bench.show.live import LiveState
from mstarctl.bench.target import BenchTarget

READ_S: Final = 0.25
LEAD_S: Final = 0.2
"""Time between the command to start and the first intended time."""

SILENT_S: Final = 60.0
LAG_MS: Final = 5.0
LAG_SHARE: Final = 0.05
BUSY_SHARE: Final = 0.7
"""A client above this share of a core, or with a p99 lag above 5 ms and 5 % of the median, bounds the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Everything of one run besides its target. out: folder of the result."""

    load: Load
    workload: Workload
    measures: Measures
    out: Path
    slo: str = ""
    goals: tuple[Term, ...] = ()
    asserts: tuple[Term, ...] = ()
    allows_few: bool = False
    timeout_s: float = 120.0
    grace_s: float = 30.0
    processes: int = 1
    protocol: str = "generate"
    is_checked: bool = True
    max_in_flight: int = 4096
    label: str = ""
    fails_fast: bool = False
    keeps_outputs: bool = False
    count_tokens: TokenCounter | None = None
    silent_s: float = SILENT_S
    joins_spans: bool = True
    expects_restarts: bool = False


@dataclass(slots=True)
class Driven:
    """Observations of a run while it lasts. Owned by `drive`. ends: reasons of the ends of phases."""

    counters: dict[int, list[Counters]] = field(default_factory=dict)
    ends: list[str] = field(default_factory=list)
    is_interrupted: bool = False
    stop_reason: str = ""
    in_flight: list[tuple[float, int]] = field(default_factory=list)
    firsts: list[tuple[float, float]] = field(default_factory=list)


class BenchRun:
    """One run against one target. Owned by the command; `perform` is called once."""

    def __init__(self, target: BenchTarget, options: RunOptions, display: Display) -> None:
        self._target = target
        self._options = options
        self._display = display
        self._prefix = f"b-{secrets.token_hex(4)}-"
        self._driven = Driven()
        self._state = LiveState(
            title=options.workload.name,
            load=str(options.load),
            measures=options.measures,
            goals=options.goals,
            total=0,
            span_s=0.0,
            warm_total=options.load.warm_up,
            warm_limit_s=options.load.warm_up_s,
        )

    def perform(self) -> dict[str, Any]:
        """Run and write the result. Returns its facts. Ctrl-C ends the window and keeps what there is.

        Raises TimedOut without any response for a minute, and errors of the plan before anything is sent.
        """
        options = self._options
        partial = result.begin(options.out)
        began = datetime.now(UTC).isoformat(timespec="seconds")
        plan = make_plan(
            options.load,
            options.workload,
            self._target.card,
            protocol=options.protocol,
            processes=options.processes,
            bodies=partial / "bodies.bin",
            prefix=self._prefix,
        )
        self._state.total, self._state.span_s = 0 if options.load.span_s else plan.total, options.load.span_s or 0.0
        server = ServerSide(self._target, f"bench {options.workload.name} {options.load}")
        recorder = RunRecorder(
            partial, plan, options.load.warm_up, is_checked=options.is_checked, count_tokens=options.count_tokens
        )
        try:
            result.write_json(
                partial / result.ENVIRONMENT,
                {**environment(self._target), "clock": server.clock(), "selftest": last_ceiling()},
            )
            with (partial / result.TIMELINE).open("w") as timeline:
                self._drive(plan, recorder, server, partial, timeline)
            outputs = _Outputs(partial) if options.keeps_outputs else None
            recorder.finish(outputs.keep if outputs is not None else None)
            fetched = server.fetch(partial, self._prefix, len(plan.asked)) if options.joins_spans else 0
        finally:
            recorder.close()
            server.close()
        facts = self._facts(plan, partial, began, server, fetched)
        result.write_json(partial / result.RESULT, facts)
        result.finish(partial, options.out)
        return facts

    # -- driving ------------------------------------------------------------------------------------------

    def _drive(self, plan: RunPlan, recorder: RunRecorder, server: ServerSide, folder: Path, timeline: IO[str]) -> None:
        with Crew(self._plans(plan), folder) as crew:
            for phase in (WARM_UP, MEASURED):
                if phase == WARM_UP and not self._options.load.warm_up:
                    continue
                if self._driven.is_interrupted or self._driven.stop_reason:
                    return
                start_ns = time.monotonic_ns() + round(LEAD_S * 1e9)
                recorder.starts[phase] = start_ns
                if phase == MEASURED:
                    self._state.begin()
                    server.begin(start_ns)
                crew.send(f"go {phase} {start_ns}")
                self._follow(crew, phase, start_ns, recorder, server, timeline)

    def _plans(self, plan: RunPlan) -> list[ClientPlan]:
        options = self._options
        return [
            ClientPlan(
                number=number,
                server=self._target.server,
                bodies=str(plan.bodies),
                phases=phases,
                timeout_s=options.timeout_s,
                grace_s=options.grace_s,
                max_in_flight=max(1, options.max_in_flight // options.processes),
            )
            for number, phases in enumerate(plan.phases)
        ]

    def _follow(
        self, crew: Crew, phase: int, start_ns: int, recorder: RunRecorder, server: ServerSide, timeline: IO[str]
    ) -> None:
        """Read messages until every client has ended the phase. Ctrl-C stops it and keeps what is there."""
        waiting = set(range(self._options.processes))
        heard_at = time.monotonic()
        next_second = time.monotonic() + 1.0
        begun = self._state.sent
        while waiting:
            try:
                for message, raw in crew.read(READ_S):
                    match message:
                        case Record():
                            heard_at = time.monotonic()
                            self._add(recorder.add(message, raw), phase)
                        case Counters():
                            self._driven.counters.setdefault(message.number, []).append(message)
                            self._state.counters[message.number] = message
                        case PhaseEnd():
                            waiting.discard(message.number)
                            self._driven.ends.append(message.reason)
                            if message.reason == "client_error":
                                raise MstarError("a client process failed", hint="its error is above: report it")
                now = time.monotonic()
                self._state.elapsed_s = max(0.0, (time.monotonic_ns() - start_ns) / 1e9)
                if now >= next_second:
                    next_second = now + 1.0
                    self._second(server, timeline, phase)
                self._display.show(self._state)
                self._watch(crew, heard_at, has_sent=self._state.sent > begun)
            except KeyboardInterrupt:
                if self._driven.is_interrupted:
                    raise
                self._driven.is_interrupted = True
                crew.send("stop")
                self._display.say("interrupted: requests in flight are awaited; press Ctrl-C again to leave them")

    def _add(self, outcome: Outcome, phase: int) -> None:
        if phase != MEASURED:
            self._state.warm[outcome.status] += 1
            return
        self._state.add(outcome)
        if outcome.chunks:
            base = outcome.due_s if self._options.measures.is_late else outcome.sent_s
            self._driven.firsts.append((outcome.due_s, outcome.chunks[0].at_s - base))

    def _second(self, server: ServerSide, timeline: IO[str], phase: int) -> None:
        """Write a bucket of the timeline, and report progress."""
        self._state.second()
        self._state.server = server.state()
        facts = self._state.facts()
        server.progress(facts)
        if phase == MEASURED:
            self._driven.in_flight.append((self._state.elapsed_s, self._state.in_flight))
            bucket = {name: facts[name] for name in ("elapsed_s", "sent", "done", "in_flight", "errors")}
            bucket["rss_bytes"] = sum(counter.rss_bytes for counter in self._state.counters.values())
            timeline.write(json.dumps({**bucket, "server": self._state.server}) + "\n")

    def _watch(self, crew: Crew, heard_at: float, *, has_sent: bool) -> None:
        """Stop a run that cannot give a result any more."""
        if self._state.in_flight and time.monotonic() - heard_at > self._options.silent_s:
            crew.send("quit")
            raise TimedOut(
                f"no response for {self._options.silent_s:g} s",
                f"{self._state.in_flight} requests are in flight",
                "mstarctl ps, mstarctl logs",
                code="no_response",
            )
        if self._options.fails_fast and self._state.errors and not self._driven.stop_reason:
            self._driven.stop_reason = "the first error (--fail-fast)"
            crew.send("stop")

    # -- the result ---------------------------------------------------------------------------------------

    def _facts(self, plan: RunPlan, folder: Path, began: str, server: ServerSide, fetched: int) -> dict[str, Any]:
        options, driven = self._options, self._driven
        opened = result.ResultFolder(path=folder, facts={})
        outcomes = opened.outcomes()
        window = self._window(outcomes, plan)
        summary = summarised(outcomes, window, options.measures, options.goals)
        client = self._client_facts(outcomes, summary["metrics"], window)
        facts: dict[str, Any] = {
            "schema": result.SCHEMA,
            "definitions": result.definitions(),
            "when": began,
            "label": options.label,
            "command": shlex.join(["mstarctl", *sys.argv[1:]]),
            "run": self._prefix,
            "seed": options.load.seed,
            "workload": {"name": options.workload.name, "title": options.workload.title, "hash": plan.hash},
            "load": options.load.facts(),
            "load_text": str(options.load),
            "protocol": options.protocol,
            "measures": msgspec.to_builtins(options.measures),
            "slo": options.slo,
            "window": {"start_s": window.start_s, "end_s": window.end_s},
            "server": {"name": self._target.name, "model": self._target.model, "url": self._target.url},
            **summary,
            "client": client,
            "is_interrupted": driven.is_interrupted,
            "stopped": self._stop_reason(),
        }
        facts["failures"], facts["outages"] = failures(outcomes), outages(outcomes)
        facts["server_events"] = server.events()
        facts["incidents"] = incidents(facts["server_events"], window)
        facts["expects_restarts"] = options.expects_restarts
        facts["shares"] = self._shares(outcomes, opened, window) if fetched else {}
        facts["is_over_saturated"] = self._is_over_saturated(window)
        facts["asserts"] = [msgspec.to_builtins(judged) for judged in self._judged(facts)]
        facts["notes"], facts["warnings"] = self._notes(outcomes), self._warnings(facts, server)
        return facts

    def _window(self, outcomes: list[Outcome], plan: RunPlan) -> MeasuredWindow:
        window = window_of(outcomes, plan.span_s, plan.ramp_s)
        if self._driven.is_interrupted or self._driven.stop_reason or any(self._driven.ends):
            last = max((outcome.end_s for outcome in outcomes), default=window.start_s)
            return MeasuredWindow(
                start_s=window.start_s, end_s=max(window.start_s + 1e-6, min(window.end_s, last + 1e-6))
            )
        return window

    def _client_facts(
        self, outcomes: list[Outcome], metrics: Mapping[str, Any], window: MeasuredWindow
    ) -> dict[str, Any]:
        """Return the costs of the clients, and whether they bound the result."""
        late = [outcome.sent_s - outcome.due_s for outcome in outcomes if outcome.sent_s >= 0] or [0.0]
        lag_ms = 1e3 * sorted(late)[min(len(late) - 1, math.ceil(0.99 * len(late)) - 1)]
        shares, memory, loop_lag = [], [], 0.0
        for series in self._driven.counters.values():
            if len(series) > 1:
                first, last = series[len(series) // 4], series[-1]
                span_s = (last.time_ns - first.time_ns) / 1e9
                shares.append((last.cpu_s - first.cpu_s) / span_s if span_s else 0.0)
            memory.append([counter.rss_bytes for counter in series])
            loop_lag = max([loop_lag, *(counter.loop_lag_ms for counter in series)])
        chunks = sum(len(outcome.chunks) for outcome in outcomes)
        usual_ms = next(
            (
                metrics[name]["p50"]
                for name in ("ttft", "ttfa", "ttfi", "chunk", "ttfs", "latency")
                if "p50" in metrics.get(name, {})
            ),
            0.0,
        )
        is_late = self._options.measures.is_late
        bound = []
        if is_late and lag_ms > LAG_MS and lag_ms > LAG_SHARE * usual_ms:
            bound.append(f"requests left late: lag p99 {lag_ms:.1f} ms")
        if shares and max(shares) > BUSY_SHARE:
            needed = math.ceil(len(shares) * max(shares) / BUSY_SHARE)
            bound.append(f"a client process used {100 * max(shares):.0f} % of a core: --processes {needed + 1}")
        limit = least_ceiling()
        rate = metrics.get("throughput", {}).get("value", 0.0) / self._options.processes
        if limit and rate > limit / 2:
            bound.append(f"{rate:.0f} requests/s per process is above half the ceiling of {limit:.0f}/s")
        return {
            "processes": self._options.processes,
            "cpu_share": round(max(shares, default=0.0), 4),
            "rss_bytes_first": max((rss[len(rss) // 4] for rss in memory if rss), default=0),
            "rss_bytes_last": max((rss[-1] for rss in memory if rss), default=0),
            "loop_lag_ms": round(loop_lag, 3),
            "lag_p99_ms": round(lag_ms, 3) if is_late else None,
            "sent": sum(series[-1].sent for series in self._driven.counters.values() if series),
            "switches": sum(series[-1].switches for series in self._driven.counters.values() if series),
            "reads_per_chunk": round(sum(o.reads for o in outcomes) / chunks, 3) if chunks else None,
            "reused": sum(o.is_reused for o in outcomes),
            "is_bound": bool(bound),
            "bounds": bound,
        }

    def _shares(self, outcomes: list[Outcome], opened: result.ResultFolder, window: MeasuredWindow) -> dict[str, Any]:
        mine = [outcome for outcome in outcomes if window.holds(outcome.due_s)]
        joined_spans = joined(mine, opened.spans())
        usual, slow = slow_and_usual(mine, joined_spans.by_id, self._options.measures.is_late)
        rounded = [{name: round(share, 5) for name, share in shares.items()} for shares in (usual, slow)]
        return {
            "usual": rounded[0],
            "slow": rounded[1],
            "missing": joined_spans.missing,
            "joined": len(joined_spans.by_id),
        }

    def _judged(self, facts: dict[str, Any]) -> list[Judged]:
        metrics: dict[str, Any] = dict(facts["metrics"])
        usual = facts["shares"].get("usual", {}) if facts["shares"] else {}
        metrics |= {f"node.{name}.share": {"value": share} for name, share in usual.items()}
        pages = [bucket["server"].get("pages_used") or 0 for bucket in facts.get("timeline", ())]
        metrics |= {"pages.max": {"value": max(pages)}} if pages else {}
        return [judge(term, metrics, allows_few=self._options.allows_few) for term in self._options.asserts]

    def _stop_reason(self) -> str:
        if any(self._driven.ends):
            return f"over-saturated: {self._options.max_in_flight} requests were in flight (--max-in-flight)"
        return self._driven.stop_reason

    def _is_over_saturated(self, window: MeasuredWindow) -> bool:
        """Return whether requests in flight grew by half and by 8, and the median first output time by half."""
        if any(self._driven.ends):
            return True
        third = window.span_s / 3
        flights = [count for at, count in self._driven.in_flight if window.holds(at)]
        if not self._options.load.is_open or len(flights) < 6:
            return False
        size = len(flights) // 3
        early, late = sum(flights[:size]) / size, sum(flights[-size:]) / size
        firsts = [
            sorted(value for at, value in self._driven.firsts if low <= at < low + third)
            for low in (window.start_s, window.end_s - third)
        ]
        if not all(firsts):
            return False
        first, last = (values[len(values) // 2] for values in firsts)
        return late > 1.5 * early and late > early + 8 and last > 1.5 * first

    def _notes(self, outcomes: list[Outcome]) -> list[str]:
        notes = []
        if any(outcome.is_approximate for outcome in outcomes):
            notes.append(
                "tokens are approximate: the server does not count them, so each chunk is one; --tokenizer counts"
            )
        if not self._options.load.is_open and not self._options.load.period_s:
            notes.append("a closed loop hides queueing: a slow server is asked less")
        return notes

    def _warnings(self, facts: Mapping[str, Any], server: ServerSide) -> list[str]:
        warnings = [f"client bound: {text}" for text in facts["client"]["bounds"]]
        if facts["stopped"]:
            warnings.append(f"stopped at {facts['stopped']}")
        if facts["is_over_saturated"]:
            warnings.append("over-saturated: percentiles measure the length of the window")
        if not self._options.load.is_open and self._options.goals:
            warnings.append("--slo with --concurrency: goodput of a closed loop says little")
        if self._target.card.is_tiny:
            warnings.append("the server runs a miniature: its speed says little about that of the model")
        if is_disturbed(facts):
            warnings.append(
                "the server was disturbed during the window: exit 8 (--expect-restarts if that is intended)"
            )
        warnings += short_window(facts)
        if server.warning:
            warnings.append(server.warning)
        if facts["shares"] and facts["shares"]["missing"]:
            warnings.append(f"{facts['shares']['missing']} requests have no spans of the server")
        return warnings


def short_window(facts: Mapping[str, Any]) -> list[str]:
    """Return a warning if the window is shorter than a request: its throughput counts ends within the window."""
    span_s = facts["window"]["end_s"] - facts["window"]["start_s"]
    latency_ms = facts["metrics"].get("latency", {}).get("p50")
    if latency_ms is None or facts["load"]["span_s"] is None or span_s >= latency_ms / 1000:
        return []
    return [
        f"the window of {span_s:.3g} s is shorter than a request ({latency_ms / 1000:.2g} s): few or none ended in it, "
        f"so its throughput is too low; give --duration {3 * latency_ms / 1000:.0f}s or more"
    ]


class _Outputs:
    """Folder of received bodies, for --keep-outputs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "outputs"
        self._folder.mkdir()

    def keep(self, outcome: Outcome, body: bytes) -> None:
        (self._folder / f"{outcome.index}.body").write_bytes(body)


def least_ceiling() -> float:
    """Return the lowest requests per second and process of this host's last self-test; 0 without one."""
    ceiling = last_ceiling()
    if not ceiling or not ceiling.get("per_s"):
        return 0.0
    return float(min(ceiling["per_s"].values())) / int(ceiling.get("processes", 1))


def is_disturbed(facts: Mapping[str, Any]) -> bool:
    """Return whether the server restarted or left its ready state during the window, against the expectation."""
    return bool(facts.get("incidents")) and not facts.get("expects_restarts")


def exit_code(facts: Mapping[str, Any], *, is_strict: bool) -> ExitCode:
    """Return the exit code of a finished run."""
    if facts["is_interrupted"]:
        return ExitCode.INTERRUPTED
    if not facts["statuses"].get("ok") or any(not judged["holds"] for judged in facts["asserts"]):
        return ExitCode.ASSERTION
    if is_disturbed(facts):
        return ExitCode.ASSERTION
    if is_strict and facts["client"]["is_bound"]:
        return ExitCode.ASSERTION
    return ExitCode.DONE
