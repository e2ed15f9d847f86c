"""Markdown tables of a report, as quoted in the docs and printed at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

MS: Final = 1e3
Report = Mapping[str, Any]
Column = tuple[str, str, float, str]
"""Heading, metric without its label, factor, and the statistic."""

CLIENT: Final[tuple[Column, ...]] = (
    ("n", "request", 1, "n"),
    ("ids/s", "ids_per_s", 1, "p50"),
    ("audio s/s", "audio_s_per_s", 1, "p50"),
    ("RTF p50", "realtime_factor", 1, "p50"),
    ("first audio p50, ms", "first_audio", MS, "p50"),
    ("p95, ms", "first_audio", MS, "p95"),
    ("max, ms", "first_audio", MS, "max"),
    ("of it outside the api, ms", "first_audio_outside_api", MS, "p50"),
    ("longest gap, ms", "longest_gap", MS, "max"),
    ("requests that ran dry", "requests_with_underrun_buffer_0ms", 1, "p50"),
    ("the same, 100 ms buffer", "requests_with_underrun_buffer_100ms", 1, "p50"),
    ("goodput, 1/s", "goodput", 1, "p50"),
)
STEP: Final[tuple[Column, ...]] = (
    ("rows", "rows_per_step", 1, "p50"),
    ("in flight, ms", "busy_per_step", MS, "p50"),
    ("launch, ms", "launch_per_step", MS, "p50"),
    ("collect, ms", "collect_per_step", MS, "p50"),
    ("route, ms", "route_per_step", MS, "p50"),
    ("graph hits", "graph_hit_share", 1, "p50"),
)
SHARES: Final[tuple[Column, ...]] = tuple(
    (name, f"{name}_share", 1, "p50") for name in ("steps", "wait", "rest", "idle")
)


def tables(report: Report) -> str:
    """Format one report: conditions, clients, steps, the worker's time, CPU, the storm, ratios."""
    labels, metrics = list(report["sections"]), report["metrics"]
    parts = [conditions(report)]
    parts.append(table("load", CLIENT, {label: pick(metrics, label, "") for label in labels}))
    for node in nodes(metrics):
        rows = {label: pick(metrics, label, f"{node}_") for label in labels}
        parts.append(table(f"a step of {node}", STEP, rows))
    for worker in sorted({name.partition("_steps_share_")[0] for name in metrics if "_steps_share_" in name}):
        rows = {label: pick(metrics, label, f"{worker}_") for label in labels}
        parts.append(table(f"share of {worker}'s thread", SHARES, rows))
    parts.append(cpu_table(metrics, labels))
    if "storm" in report["sections"]:
        parts.append(storm_line(report["sections"]["storm"]))
    if "compare" in report:
        parts.append(ratio_table(report))
    return "\n\n".join(part for part in parts if part)


def conditions(report: Report) -> str:
    """Format the conditions as a paragraph: machine, date, source and command."""
    env = report["env"]
    where = f"{env['gpu'] or 'no GPU'}, {env['cores']} cores, torch {env['torch']}, python {env['python']}"
    source = f"commit {report['commit']}{' with changes' if report['dirty'] else ''}"
    phases = ", ".join(f"{name} {seconds:g}" for name, seconds in report["phases"].items())
    ends = f"errors {report['errors'] or 'none'}, held {report['held'] or 'nothing'}"
    return (
        f"{report['when']}, {source}: {report['model']} on {where}. Ready {report['ready_s']} s ({phases}); {ends}.\n"
        f"Settings: {' '.join(report['config']['settings'])}. Made by `{report['command']}`."
    )


def pick(metrics: Mapping[str, Any], label: str, prefix: str) -> Callable[[Column], str]:
    """Function that returns a column's cell for one section."""

    def cell(column: Column) -> str:
        _, name, factor, which = column
        value = metrics.get(f"{prefix}{name}_{label}", {}).get(which)
        return "" if value is None else f"{value * factor:.4g}"

    return cell


def table(title: str, columns: Iterable[Column], rows: Mapping[str, Callable[[Column], str]]) -> str:
    """Format a Markdown table without its empty rows and columns. A table without rows is empty."""
    cells = {label: {column: cell(column) for column in columns} for label, cell in rows.items()}
    cells = {label: row for label, row in cells.items() if any(row.values())}
    kept = [column for column in columns if any(row[column] for row in cells.values())]
    lines = [f"| {label} | {' | '.join(row[column] for column in kept)} |" for label, row in cells.items()]
    if not lines:
        return ""
    heading = f"| {title} | {' | '.join(column[0] for column in kept)} |"
    return "\n".join([heading, "|" + "---|" * (len(kept) + 1), *lines])


def nodes(metrics: Mapping[str, Any]) -> list[str]:
    """Return the nodes whose steps were counted."""
    return sorted({name.partition("_launch_per_step_")[0] for name in metrics if "_launch_per_step_" in name})


def cpu_table(metrics: Mapping[str, Any], labels: list[str]) -> str:
    """Format the share of a core by process and section."""
    names = {
        name.removeprefix("cpu_").removesuffix(f"_{label}")
        for label in labels
        for name in metrics
        if name.startswith("cpu_") and name.endswith(f"_{label}")
    }
    columns: list[Column] = [(name, f"cpu_{name}", 1, "p50") for name in sorted(names)]
    return table("share of a core", columns, {label: pick(metrics, label, "") for label in labels})


def storm_line(facts: Mapping[str, Any]) -> str:
    """Format the state after the storm."""
    grown = ", ".join(f"{name} {size / 2**20:+.1f}" for name, size in facts["grown_bytes"].items())
    return (
        f"Storm: outcomes {facts['outcomes']}, unaccounted {facts['unaccounted']}, held {facts['held'] or 'nothing'}, "
        f"MiB grown after the warm-up: {grown}."
    )


def ratio_table(report: Report) -> str:
    """Format the ratios of the changed deployment's medians to the base's, for client metrics."""
    compared = report["compare"]
    wanted = ("ids_per_s", "audio_s_per_s", "realtime_factor", "first_audio", "longest_gap", "request", "ready_s")
    lines = []
    for name, ratio in compared["ratios"].items():
        if name.startswith(wanted) and "_api_" not in name and "sound" not in name:
            base, changed = report["metrics"][name], compared["metrics"][name]
            lines.append(f"| {name} | {base['p50']:.4g} | {changed['p50']:.4g} | {ratio:.3f} | {base['n']} |")
    other = " ".join([*compared["settings"], *filter(None, [compared.get("tree")])])
    heading = f"| median | base | {other} | ratio | n |"
    return "\n".join([heading, "|---|---|---|---|---|", *lines])
