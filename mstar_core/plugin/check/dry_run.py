"""Dry run of a model's programs on a sample: every run is checked against the walks. Called at load."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from mstar_core.errors import GraphError, MstarError, did_you_mean
from mstar_core.graph import PortType, Walk, graph_nodes, loops
from mstar_core.graph.check.graph_check import walk_inputs
from mstar_core.graph.declare.sampling import OFFERED
from mstar_core.plugin.check.run_check import check_inputs, check_ports
from mstar_core.plugin.params import parse_params
from mstar_core.plugin.program import Fork, InputFact, ProgramRequest, Run, Segment, Signal, WalkResult
from mstar_core.plugin.spec import ModelSpec, Partition, Sample

MOST_RUNS: Final = 10_000
"""Maximum number of runs of a program for one sample."""

Ending = Literal["stop", "length"]
WalkInputs = dict[str, dict[str, PortType]]
"""Inputs of a Run by walk."""


@dataclass(slots=True)
class DryRun:
    """State of one dry run. runs: those of each partition and its forks, in order."""

    spec: ModelSpec
    request: ProgramRequest
    ending: Ending
    inputs: WalkInputs
    runs: dict[str, list[Run | Fork]] = field(default_factory=dict)
    keys: Iterator[int] = field(default_factory=itertools.count)


def sample_request(spec: ModelSpec, sample: Sample) -> ProgramRequest:
    """Return the request that a sample describes. Raises RequestError for invalid parameters."""
    segments = []
    for index, (kind, inputs) in enumerate(sample.segments):
        facts = {name: InputFact(name=name, shape=tuple(shape)) for name, shape in inputs.items()}
        length = max((len(fact) for fact in facts.values()), default=0)
        segments.append(
            Segment(kind=kind, index=index, length=length, is_last=index == len(sample.segments) - 1, inputs=facts)
        )
    return ProgramRequest(
        params=parse_params(spec.params, sample.params).params,
        inputs={name: InputFact(name=name, shape=tuple(shape)) for name, shape in sample.inputs.items()},
        segments=tuple(segments),
        outputs=sample.outputs,
        facts=sample.facts,
    )


def dry_run(spec: ModelSpec, sample: Sample, inputs: WalkInputs | None = None) -> dict[str, list[str]]:
    """Drive every partition that the sample starts, twice: with loops that stop, and with loops that reach their limit.

    inputs: cache of the inputs of each walk, for callers that run several samples.
    Returns the walks taken by each partition (of the second pass). Raises GraphError naming partition, walk and input.
    """
    request = sample_request(spec, sample)
    inputs = {} if inputs is None else inputs
    _driven(spec, request, "stop", inputs)
    runs_of = _driven(spec, request, "length", inputs)
    return {name: [run.walk for run in runs if isinstance(run, Run)] for name, runs in runs_of.items()}


def sample_runs(spec: ModelSpec, sample: Sample) -> dict[str, list[Run | Fork]]:
    """Return the runs and forks of every partition that a sample starts, with loops that reach their limit.

    Raises GraphError like `dry_run`.
    """
    return _driven(spec, sample_request(spec, sample), "length", {})


def _driven(
    spec: ModelSpec, request: ProgramRequest, ending: Ending, inputs: WalkInputs
) -> dict[str, list[Run | Fork]]:
    dry = DryRun(spec, request, ending, inputs)
    for partition in spec.active_partitions(request):
        _drive(dry, partition)
    return dry.runs


def _drive(dry: DryRun, partition: Partition) -> None:
    place = f"{dry.spec.name}: program of partition {partition.name!r}"
    runs = dry.runs.setdefault(partition.name, [])
    try:
        generator = partition.program(dry.request)
        if not inspect.isgenerator(generator):
            raise GraphError(f"{place} is not a generator", hint="write it with yield", place=partition.name)
        answer: Any = None
        is_over = False
        for _ in range(MOST_RUNS):
            step = generator.send(answer)
            if is_over:
                raise GraphError(f"{place} goes on after a Run that finishes it", place=partition.name)
            answer = _answer(dry, partition, step)
            if isinstance(step, list):
                runs += step
            elif isinstance(step, Run | Fork):
                runs.append(step)
            is_over = has_finish(step)
    except StopIteration:
        return
    except MstarError:
        raise
    except Exception as error:  # the isolation boundary of a plugin's program
        raise GraphError(f"{place} raised {type(error).__name__}: {error}", place=partition.name) from error
    raise GraphError(f"{place} does not end", f"{MOST_RUNS} runs for one sample", place=partition.name)


def has_finish(step: Any) -> bool:
    """Return whether what a program yielded finishes it. Raises GraphError if a list goes on after a run that does."""
    runs = step if isinstance(step, list) else [step]
    finishes = [isinstance(run, Run) and run.finishes for run in runs]
    if any(finishes[:-1]):
        raise GraphError("a list of runs goes on after one that finishes", hint="set finishes on the last of them")
    return bool(finishes) and finishes[-1]


def _answer(dry: DryRun, partition: Partition, step: Any) -> WalkResult | list[WalkResult] | None:
    match step:
        case Run():
            return _run(dry, partition, step)
        case Fork(source=source, into=into):
            for branch in (source, into) if source else (into,):
                _check_branch(dry.spec, partition, branch, type(step).__name__)
            return None
        case list():
            return [_run(dry, partition, run) for run in step]
        case _:
            raise GraphError(
                f"{dry.spec.name}: partition {partition.name!r} yielded {type(step).__name__}",
                hint="yield a Run, a list of Runs or a Fork",
                place=partition.name,
            )


def _run(dry: DryRun, partition: Partition, run: Any) -> WalkResult:
    if not isinstance(run, Run):
        raise GraphError(
            f"{dry.spec.name}: a list of {type(run).__name__} in partition {partition.name!r}",
            hint="a list holds Runs only",
        )
    walk = partition.walks.get(run.walk)
    if walk is None:
        hint = did_you_mean(run.walk, partition.walks)
        raise GraphError(
            f"{dry.spec.name}: program of partition {partition.name!r} runs walk {run.walk!r}",
            hint=hint,
            place=partition.name,
        )
    place = f"{dry.spec.name}: Run({run.walk!r})"
    ports = dry.inputs.get(run.walk)
    if ports is None:
        ports = dry.inputs[run.walk] = walk_inputs(walk, dry.spec.streams)
    check_inputs(ports, run, place)
    for branch in run.branches:
        _check_branch(dry.spec, partition, branch, place)
    if run.rows < 1:
        raise GraphError(f"{place} has rows={run.rows}", hint="at least 1", place=run.walk)
    counts = _check_limits(dry, walk, run, place)
    check_ports(walk, run, place)
    for name in run.sampling:
        if name not in OFFERED:
            raise GraphError(f"{place} sets sampling {name!r}", hint=did_you_mean(name, OFFERED), place=run.walk)
    kept = {port: Signal(port=port, key=next(dry.keys)) for port in run.keep}
    stops = any(loop.stop is not None for loop in loops(walk))
    reason = "done" if not counts else dry.ending if stops else "length"
    values = {port: _dry_values(walk, port) for port in run.reads}
    return WalkResult(reason=reason, counts=counts, signals=kept, values=values)


def _dry_values(walk: Walk, port: str) -> tuple[int, ...]:
    """Return zeros of the port's declared shape, one for each dimension that is not a number."""
    spec = next(use.spec for use in graph_nodes(walk) if port in use.spec.ports)
    sizes = (size if isinstance(size, int) else 1 for size in spec.port(port).shape)
    return (0,) * math.prod(sizes)


def _check_limits(dry: DryRun, walk: Walk, run: Run, place: str) -> dict[str, int]:
    known = {loop.name: loop for loop in loops(walk)}
    if isinstance(run.max_iters, Mapping):
        for name in run.max_iters:
            if name not in known:
                raise GraphError(f"{place} limits loop {name!r}", hint=did_you_mean(name, known), place=run.walk)
    counts: dict[str, int] = {}
    for loop in known.values():
        limit = run.max_iters.get(loop.name) if isinstance(run.max_iters, Mapping) else run.max_iters
        if limit is None and loop.stop is None and loop.over is None:
            raise GraphError(f"{place}: loop {loop.name!r} never ends", hint="pass max_iters", place=run.walk)
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
            raise GraphError(
                f"{place}: max_iters of loop {loop.name!r} is {limit!r}", hint="a whole number", place=run.walk
            )
        counts[loop.name] = max(0, min(limit, 2) if limit is not None and dry.ending == "stop" else limit or 2)
    return counts


def _check_branch(spec: ModelSpec, partition: Partition, branch: str, place: str) -> None:
    used = {use.spec for walk in partition.walks.values() for use in graph_nodes(walk)}
    known = {name for node in used if node.kv is not None for name in node.kv.branches} or {"main"}
    if branch not in known:
        hint = did_you_mean(branch, known)
        raise GraphError(
            f"{place} names cache branch {branch!r} in partition {partition.name!r} of {spec.name}",
            hint=hint,
            place=partition.name,
        )
