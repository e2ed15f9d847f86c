"""Report of a result or of a sweep as one HTML page that contains its charts, without scripts and links."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import ConfigError, UsageError
from mstarctl.bench.measure.incidents import incident_lines
from mstarctl.bench.measure.load_metrics import BY_NAME, FIRSTS
from mstarctl.bench.measure.outcome import Outcome
from mstarctl.bench.result import ResultFolder
from mstarctl.bench.show import plot
from mstarctl.bench.show.again import again, slowest_lines
from mstarctl.bench.show.chart import Chart
from mstarctl.bench.show.live import number
from mstarctl.bench.show.picture import DARK, LIGHT, colour_rules, svg
from mstarctl.bench.show.table import (
    COLUMNS,
    WINDOW_ORDER,
    assert_line,
    cell,
    head_line,
    note_texts,
    percentile_rows,
    rate_text,
    sweep_rows,
)

DISTRIBUTIONS: Final = ("itl", "rtf", "step", "latency")
"""Metrics with a distribution of their own, besides the first output."""

SLOWEST: Final = 10
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
STYLE: Final = """
:root{color-scheme:light dark;--ground:#ffffff;--card:#f6f8fa;--ink:#1f2933;--dim:#52606d;--line:#d9dfe6;--bad:#b42318;
--warn:#8a5a00;--bad-ground:#fdecea}
@media(prefers-color-scheme:dark){:root{--ground:#0e1218;--card:#14181f;--ink:#e4e9f0;--dim:#9aa7b6;--line:#2a323d;
--bad:#ff8f85;--warn:#f0b65a;--bad-ground:#35191c}}
body{margin:0 auto;max-width:1000px;padding:24px 20px 60px;font:15px/1.5 system-ui,sans-serif;background:var(--ground);
color:var(--ink)}
h1{font-size:24px;margin:0 0 4px}h2{font-size:18px;margin:32px 0 10px}p{margin:4px 0}.dim{color:var(--dim)}
code{font:13px ui-monospace,monospace;overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:12px;margin:18px 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 14px}
.tile b{display:block;font-size:22px;font-weight:600}.tile span{color:var(--dim);font-size:13px}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:5px 10px;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--dim);font-weight:500;font-size:13px}th:first-child,td:first-child{text-align:left}
.text td,.text th{text-align:left;white-space:normal;overflow-wrap:anywhere}
.loud{background:var(--bad-ground);border-left:4px solid var(--bad);padding:8px 14px;margin:10px 0;font-weight:600}
.warn{color:var(--warn)}.bad{color:var(--bad);font-weight:600}
figure{margin:14px 0;border:1px solid var(--line);border-radius:8px;overflow:hidden}svg{display:block;width:100%}
details{margin:10px 0}summary{cursor:pointer;padding:4px 0}
"""


def report(path: Path) -> str:
    """Return the page of a folder of a run or of a sweep. Raises ConfigError if it is neither."""
    sweep = plot.sweep_facts(path)
    if sweep is not None:
        folder = path if path.is_dir() else path.parent
        return _page(f"{sweep['model']}: sweep of {sweep['workload']}", "".join(_sweep(sweep, folder)))
    opened = ResultFolder.opened(path)
    outcomes = opened.outcomes()
    facts = again(opened, outcomes)
    opened = ResultFolder(path=opened.path, facts=facts)
    title = f"{facts['server']['model']}: {facts['workload']['name']}, {facts['load_text']}"
    return _page(title, "".join(_run(opened, outcomes)))


def _page(title: str, body: str) -> str:
    dark = f"@media(prefers-color-scheme:dark){{{colour_rules(DARK)}}}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE}{colour_rules(LIGHT)}{dark}</style></head>\n<body><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


# -- one run ------------------------------------------------------------------------------------------------------


def _run(opened: ResultFolder, outcomes: Sequence[Outcome]) -> Iterator[str]:
    facts = opened.facts
    yield f'<p class="dim">{escape(facts["when"])}{_labelled(facts)} · {escape(head_line(facts))}</p>'
    yield f"<p><code>{escape(facts['command'])}</code></p>"
    yield from (f'<p class="loud">{escape(line)}</p>' for line in incident_lines(facts))
    failed = [judged for judged in facts.get("asserts", ()) if not judged["holds"]]
    yield from (f'<p class="loud">{escape(assert_line(judged))}</p>' for judged in failed)
    yield from (f'<p class="warn">warning: {escape(text)}</p>' for text in facts.get("warnings", ()))
    yield from (f'<p class="dim">note: {escape(text)}</p>' for text in note_texts(facts))
    yield _tiles(facts)
    yield _figures(opened, outcomes)
    yield _tables(facts)
    slow = slowest_lines(opened, outcomes, SLOWEST)
    if slow:
        yield f"<h2>Slowest requests</h2>{_table([['request'], *([line] for line in slow)], kind='text')}"
    yield _environment(opened)
    yield _definitions(facts)


def _labelled(facts: Mapping[str, Any]) -> str:
    return f" · {escape(facts['label'])}" if facts.get("label") else ""


def _tiles(facts: Mapping[str, Any]) -> str:
    """Return the figures of the modalities in use as large numbers."""
    metrics = facts["metrics"]
    tiles = [(f"{facts['statuses'].get('ok', 0)} of {facts['intended']}", "requests succeeded")]
    tiles += [
        (rate_text(name, metrics), name.replace("_", " "))
        for name in ("throughput", "goodput", "text_rate", "audio_rate", "miss_rate", "error_rate")
        if name in metrics
    ]
    for name in [name for name in (*FIRSTS, "rtf") if name != "latency" or not set(FIRSTS[:-1]) & metrics.keys()]:
        if "p50" in metrics.get(name, {}) and len(tiles) < 9:
            unit = f" {BY_NAME[name].unit}" if BY_NAME[name].unit else ""
            tiles += [(f"{cell(metrics[name], which)}{unit}", f"{name} {which}") for which in ("p50", "p99")]
    shown = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in tiles
    )
    return f'<div class="tiles">{shown}</div>'


def _figures(opened: ResultFolder, outcomes: Sequence[Outcome]) -> str:
    mine = [outcome for outcome in outcomes if opened.window.holds(outcome.due_s)]
    first = next((name for name in FIRSTS if name in opened.facts["metrics"]), "latency")
    names = [first, *(name for name in DISTRIBUTIONS if name != first)]
    sections: list[tuple[str, list[Callable[[], Chart]]]] = [
        ("Over time", [partial(plot.timeline, opened, mine)]),
        ("Distributions", [partial(plot.distribution, opened, mine, name) for name in names]),
        ("Where the time went", [partial(plot.nodes, opened, mine)]),
        ("Playback of the worst request", [partial(plot.audio_buffer, opened, mine)]),
    ]
    parts = []
    for title, charts in sections:
        drawn = []
        for chart in charts:
            with suppress(UsageError):  # the result has no such figures
                drawn.append(_figure(chart()))
        parts += [f"<h2>{title}</h2>", *drawn] if drawn else []
    return "".join(parts)


def _figure(chart: Chart) -> str:
    return f"<figure>{svg(chart, is_inline=True)}</figure>"


def _tables(facts: Mapping[str, Any]) -> str:
    metrics = facts["metrics"]
    rows = [["metric", *COLUMNS, "n"], *percentile_rows(metrics)]
    parts = ["<h2>Percentiles</h2>", _table(rows)]
    if any("~" in text for row in rows for text in row):
        parts.append(
            '<p class="dim">~ fewer samples than this percentile needs: indicative only. '
            "&gt; requests were cut: a lower limit.</p>"
        )
    rates = [[name.replace("_", " "), rate_text(name, metrics)] for name in WINDOW_ORDER if name in metrics]
    parts += ["<h2>Rates</h2>", _table([["metric", "value"], *rates])]
    goals = [[text, f"{100 * share:.1f} %"] for text, share in facts.get("attained", {}).items()]
    parts += ["<h2>Goals</h2>", _table([["goal", "met by"], *goals])] if goals else []
    asserts = [[judged["text"], assert_line(judged)] for judged in facts.get("asserts", ())]
    parts += ["<h2>Assertions</h2>", _table([["assertion", "result"], *asserts], kind="text")] if asserts else []
    failed = [[str(failure["n"]), failure["status"], failure["reason"]] for failure in facts.get("failures", ())]
    if failed:
        parts += ["<h2>Failed requests</h2>", _table([["requests", "class", "reason"], *failed], kind="text")]
    return "".join(parts)


def _table(rows: Sequence[Sequence[str]], kind: str = "") -> str:
    head, *rest = rows
    titles = "".join(f"<th>{escape(text)}</th>" for text in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rest)
    return f'<div class="scroll"><table class="{kind}"><tr>{titles}</tr>{lines}</table></div>'


def _environment(opened: ResultFolder) -> str:
    with suppress(ConfigError):
        rows = [[name, text] for name, text in _flat(opened.environment()) if text not in ("", "None")]
        return f"<h2>Environment</h2>{_table([['', ''], *rows], kind='text')}"
    return ""


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the leaves of nested objects with their names, and lists of plain values as one."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(part, f"{name} {key}".strip())
    elif isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
        for place, part in enumerate(value):
            yield from _flat(part, f"{name} {place}".strip())
    else:
        yield name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _definitions(facts: Mapping[str, Any]) -> str:
    known = facts.get("definitions", {})
    rows = [[name, str(known[name])] for name in facts["metrics"] if name in known]
    table = _table([["metric", "definition"], *rows], kind="text")
    return f"<details><summary>Definitions, version {escape(str(known.get('version', '?')))}</summary>{table}</details>"


# -- a sweep ------------------------------------------------------------------------------------------------------


def _sweep(facts: Mapping[str, Any], folder: Path) -> Iterator[str]:
    knee = f"knee {number(facts['knee'])}/s" if facts.get("knee") else "no knee"
    yield f'<p class="dim">goal {escape(facts.get("slo") or "none")} · {knee} · {len(facts["points"])} points</p>'
    yield from (f'<p class="warn">warning: {escape(text)}</p>' for text in facts.get("warnings", ()))
    if not facts["points"]:
        return
    yield f"<h2>Load</h2>{_figure(plot.sweep_chart(facts))}<h2>Points</h2>{_table(sweep_rows(facts))}"
    last: ResultFolder | None = None
    for point in facts["points"]:
        with suppress(ConfigError):  # a point whose folder was moved
            last = ResultFolder.opened(folder / str(point.get("folder", "")))
            yield _point(last)
    if last is not None:
        yield _environment(last)
        yield _definitions(last.facts)


def _point(opened: ResultFolder) -> str:
    outcomes = opened.outcomes()
    facts = again(opened, outcomes)
    current = ResultFolder(path=opened.path, facts=facts)
    loud = "".join(f'<p class="loud">{escape(line)}</p>' for line in incident_lines(facts))
    head = escape(head_line(facts))
    return f"<details><summary>{head}</summary>{loud}{_tables(facts)}{_figures(current, outcomes)}</details>"
