"""Comparison of results on disk: environments first, then intervals and verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import ConfigError, UsageError, did_you_mean
from mstarctl.bench.measure.load_metrics import BY_NAME
from mstarctl.bench.measure.verdicts import FEWEST_RUNS, Compared, RunSamples, compared, prepared
from mstarctl.bench.result import RESULT, ResultFolder
from mstarctl.bench.show.live import number

IGNORED: Final = ("load_before", "time", "uuid", "clocks.sm", "clocks.mem", "boot", "url", "name", "restarts")
AUDIO_LENGTH: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentDifference:
    """One value that differs. part: the name that --expect takes."""

    part: str
    key: str
    base: str
    changed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Result of a comparison."""

    rows: tuple[Compared, ...]
    differences: tuple[EnvironmentDifference, ...]
    runs: tuple[int, int]
    notes: tuple[str, ...]
    failed: tuple[str, ...]


def opened_side(path: Path) -> list[ResultFolder]:
    """Open a result, or a folder of results, as the runs of one side. Raises ConfigError."""
    if not path.is_dir() or (path / RESULT).exists():
        return [ResultFolder.opened(path)]
    folders = sorted(file.parent for file in path.glob(f"*/{RESULT}"))
    if not folders:
        raise ConfigError(f"{path} contains no result", hint="name the folder of a run, or of several runs")
    return [ResultFolder.opened(folder) for folder in folders]


def parse_thresholds(texts: Sequence[str]) -> dict[str, float]:
    """Parse `p99.ttft=5%` words. Raises UsageError with the nearest metric."""
    thresholds = {}
    for text in texts:
        name, equals, value = text.partition("=")
        which, dot, metric = name.partition(".")
        if not dot and name not in ("throughput", "goodput"):
            raise UsageError(f"--threshold is {text!r}", hint="--threshold p99.ttft=5%, p50, p90 or p99")
        if dot and (metric not in BY_NAME or which not in ("p50", "p90", "p99")):
            raise UsageError(f"--threshold names {name!r}", hint=did_you_mean(metric, BY_NAME))
        try:
            thresholds[name] = float(value.rstrip("%")) / (100 if value.endswith("%") else 1)
        except ValueError:
            raise UsageError(f"--threshold is {text!r}", hint="--threshold p99.ttft=5%") from None
        if not equals or thresholds[name] <= 0:
            raise UsageError(f"--threshold is {text!r}", hint="a threshold is above 0")
    return thresholds


def compare(
    base: Sequence[ResultFolder],
    changed: Sequence[ResultFolder],
    *,
    thresholds: Mapping[str, float],
    expected: Sequence[str] = (),
    allows_differences: bool = False,
) -> Comparison:
    """Compare two sides. Raises ConfigError if definitions or, unless allowed, environments differ."""
    versions = {side.facts["definitions"]["version"] for side in (*base, *changed)}
    if len(versions) > 1:
        raise ConfigError(
            "the results use different definitions of their metrics", f"versions {sorted(versions)}", "run both again"
        )
    differences = tuple(differences_of(base[0], changed[0]))
    strange = [difference for difference in differences if difference.part not in expected]
    if strange and not allows_differences:
        listed = "; ".join(
            f"{difference.part}: {difference.key} {difference.base} -> {difference.changed}"
            for difference in strange[:6]
        )
        parts = ",".join(dict.fromkeys(difference.part for difference in strange))
        raise ConfigError("the environments differ", listed, f"--expect {parts}, or --allow-env-diff")
    is_paired = all(base[0].facts[key] == changed[0].facts[key] for key in ("seed", "load_text")) and (
        base[0].facts["workload"]["hash"] == changed[0].facts["workload"]["hash"]
    )
    sides = [[_samples(run) for run in side] for side in (base, changed)]
    rows = compared(sides[0], sides[1], thresholds=thresholds, is_paired=is_paired)
    failed = tuple(row.name for row in rows if row.name in thresholds and row.verdict == "worse")
    return Comparison(
        rows=tuple(rows),
        differences=differences,
        runs=(len(base), len(changed)),
        failed=failed,
        notes=tuple(_notes(base, changed)),
    )


def _samples(run: ResultFolder) -> RunSamples:
    return prepared(run.outcomes(), run.window, run.measures, run.goals)


def _notes(base: Sequence[ResultFolder], changed: Sequence[ResultFolder]) -> Iterator[str]:
    if min(len(base), len(changed)) < FEWEST_RUNS:
        yield f"fewer than {FEWEST_RUNS} runs a side: blocks of time are resampled, noise between runs is not covered"
    lengths = [run.facts["metrics"].get("audio_s", {}).get("mean") for run in (base[0], changed[0])]
    if all(lengths) and abs(lengths[1] / lengths[0] - 1) > AUDIO_LENGTH:
        yield f"the audio has another length: {number(lengths[0])} s and {number(lengths[1])} s on average"
    for side, runs in (("A", base), ("B", changed)):
        disturbed = sum(bool(run.facts.get("incidents") or run.facts.get("outages")) for run in runs)
        if disturbed:
            yield f"the server had outages or restarts in {disturbed} of {len(runs)} runs of {side}: `bench show` it"
        bound = sum(bool(run.facts["client"]["is_bound"]) for run in runs)
        if bound:
            yield f"the client bounds {bound} of {len(runs)} runs of {side}"


def differences_of(base: ResultFolder, changed: ResultFolder) -> Iterator[EnvironmentDifference]:
    """Yield what differs between two environments: schedule, source, packages, host, GPUs and configuration."""
    for key, one, other in (
        ("seed", base.facts["seed"], changed.facts["seed"]),
        ("load", base.facts["load_text"], changed.facts["load_text"]),
        ("workload", base.facts["workload"]["hash"], changed.facts["workload"]["hash"]),
    ):
        if one != other:
            yield EnvironmentDifference(part="load", key=key, base=str(one), changed=str(other))
    left, right = base.environment(), changed.environment()
    parts = {
        "packages": "packages",
        "python": "packages",
        "cuda": "packages",
        "host": "host",
        "gpus": "gpu",
        "source": "source",
        "server": "config",
    }
    for section, part in parts.items():
        one, other = _flat(left.get(section), section), _flat(right.get(section), section)
        for key in sorted({*one, *other}):
            if key.rpartition("/")[2] in IGNORED or one.get(key) == other.get(key):
                continue
            name = key.rpartition("/")[2]
            owner = "plugin" if name.startswith("mstar-") else part
            yield EnvironmentDifference(part=owner, key=name, base=str(one.get(key)), changed=str(other.get(key)))


def _flat(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return {key: leaf for name, part in value.items() for key, leaf in _flat(part, f"{path}/{name}").items()}
    if isinstance(value, list):
        return {key: leaf for place, part in enumerate(value) for key, leaf in _flat(part, f"{path}/{place}").items()}
    return {path: value}


def comparison_rows(comparison: Comparison) -> list[list[str]]:
    """Return the table of a comparison as rows of text, headings first."""
    rows = [["metric", "A", "B", "difference [95 %]", "verdict"]]
    for row in comparison.rows:
        unit = f" {row.unit}" if row.unit and not row.unit.startswith("/") else row.unit
        interval = f"{percent(row.difference)} %  [{percent(row.low)}, {percent(row.high)}]"
        more = f"  needs about {row.runs_needed} runs" if row.runs_needed else ""
        mark = "  > threshold" if row.name in comparison.failed else ""
        rows.append(
            [
                row.name,
                f"{number(row.base)}{unit}",
                f"{number(row.changed)}{unit}",
                interval,
                f"{row.verdict}{more}{mark}",
            ]
        )
    return rows


def percent(share: float | None) -> str:
    """Return a relative difference in percent; `-` if there is none."""
    return "-" if share is None else f"{100 * share:+.1f}"


def order_of(repeats: int) -> list[str]:
    """Return A and B `repeats` times in alternating direction, A B B A A B, so that drift affects both alike."""
    return [name for turn in range(repeats) for name in (("A", "B") if turn % 2 == 0 else ("B", "A"))]


def comparison_facts(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as plain data."""
    return {
        "kind": "comparison",
        "runs": list(comparison.runs),
        "failed": list(comparison.failed),
        "notes": list(comparison.notes),
        "environment": [asdict(difference) for difference in comparison.differences],
        "metrics": [asdict(row) for row in comparison.rows],
        "rows": comparison_rows(comparison),
    }
