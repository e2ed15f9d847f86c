"""`mstarctl bench`: load tests of a deployment or of any server, their results, comparisons and plots."""

from __future__ import annotations

import json
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mstar_core.errors import ConfigError, ExitCode, UsageError, did_you_mean
from mstarctl.commands.bench_conversation import conversation
from mstarctl.complete import served_names, workload_names
from mstarctl.output import Column, Printer
from mstarctl.output.durations import parse_duration

if TYPE_CHECKING:
    from mstarctl.bench.show.display import Display

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Measure a server under load, and compare runs.",
)

app.command("conversation")(conversation)

SWEEP_WORDS: Final[dict[str, Any]] = {
    "trace": None,
    "speed": 1.0,
    "asserts": None,
    "allow_few": False,
    "think": None,
    "period": None,
    "cancel_rate": None,
    "fail_fast": False,
    "strict": False,
    "keep_outputs": False,
    "requests": None,
}
"""Options of a run that a sweep does not take."""

FORMATS: Final = ("table", "json", "md")

ModelName = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="deployment, model or gateway", autocompletion=served_names)
]
Url = Annotated[
    str | None, typer.Option("--url", help="any server with /generate or the OpenAI routes; MODEL is then one of it")
]
ServedModelName = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="a model of a gateway; optional if it has only one")
]
WorkloadName = Annotated[
    str | None,
    typer.Option(
        "--workload",
        metavar="NAME|FILE.jsonl",
        help="default: the first of `bench workloads`",
        autocompletion=workload_names,
    ),
]
Dataset = Annotated[
    str | None,
    typer.Option("--dataset", metavar="KIND:FILE", help="in place of --workload: sharegpt:FILE.json, seedtts:meta.lst"),
]
Params = Annotated[
    list[str] | None,
    typer.Option("--param", metavar="KEY=VALUE", help="a parameter of each request, over the workload's; repeatable"),
]
Rate = Annotated[str | None, typer.Option("--rate", metavar="R", help="open load: requests per second")]
ArrivalKind = Annotated[str, typer.Option("--arrivals", help="poisson, constant or gamma:SHAPE (below 1: bursts)")]
Clients = Annotated[str | None, typer.Option("--concurrency", metavar="C", help="closed load: clients")]
Trace = Annotated[Path | None, typer.Option("--trace", metavar="FILE.jsonl", help="replay requests at their times")]
Speed = Annotated[float, typer.Option("--speed", help="with --trace: divides its times")]
Requests = Annotated[int | None, typer.Option("--requests", min=1, help="length: measured requests")]
Duration = Annotated[str | None, typer.Option("--duration", help="length: measured time  [default: 30s]")]
WarmUp = Annotated[
    int | None,
    typer.Option(
        "--warmup", min=0, help="requests under the same load before the window  [default: 20, for at most 10 s]"
    ),
]
Ramp = Annotated[str | None, typer.Option("--ramp", help="the rate rises for this time, unmeasured")]
Grace = Annotated[str, typer.Option("--grace", help="wait this long for requests in flight at the end")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="draws times, bodies and lengths")]
Slo = Annotated[str | None, typer.Option("--slo", metavar="TERMS", help='goals of each request: "ttft<300ms,rtf<0.8"')]
Asserts = Annotated[
    str | None,
    typer.Option("--assert", metavar="TERMS", help='of the run: "p99.ttft<500ms,error_rate<1%"; else exit 8'),
]
AllowFew = Annotated[bool, typer.Option("--allow-few", help="assert percentiles of few samples too")]
Deadline = Annotated[str, typer.Option("--deadline", help="of an action chunk")]
PlayBuffer = Annotated[str | None, typer.Option("--play-buffer", help="audio buffered before playback  [default: 0]")]
TokenizerPath = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="DIR", help="counts the tokens of texts that a server does not count"),
]
Think = Annotated[str | None, typer.Option("--think", help="closed: pause between requests of a client")]
Period = Annotated[str | None, typer.Option("--period", help="closed: each client sends at this period")]
MaxInFlight = Annotated[int, typer.Option("--max-in-flight", min=1, help="more requests in flight stop the run")]
Timeout = Annotated[str, typer.Option("--timeout", help="of one request")]
CancelRate = Annotated[str | None, typer.Option("--cancel-rate", metavar="SHARE:TIME", help="disconnect: 5%:1s")]
Processes = Annotated[int, typer.Option("--processes", min=1, max=64, help="client processes")]
Protocol = Annotated[str, typer.Option("--protocol", help="generate or openai")]
Check = Annotated[bool, typer.Option("--check/--no-check", help="check outputs; broken ones are errors")]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="folder of the result  [default: bench-results/…]")
]
Label = Annotated[str | None, typer.Option("--label", help="name of the run in its result")]
IsLive = Annotated[bool, typer.Option("--live", help="live display even if stderr is not a terminal")]
IsPlain = Annotated[bool, typer.Option("--plain", help="a line every 5 s in place of the live display")]
FailFast = Annotated[bool, typer.Option("--fail-fast", help="stop at the first error")]
Strict = Annotated[bool, typer.Option("--strict", help="exit 8 if the client bounds the result")]
ExpectRestarts = Annotated[
    bool, typer.Option("--expect-restarts", help="restarts and outages of the server are intended: no exit 8")
]
KeepOutputs = Annotated[bool, typer.Option("--keep-outputs", help="store the answers")]
ReadyTimeout = Annotated[str, typer.Option("--ready-timeout", help="wait this long for a server that is starting")]
ApiKey = Annotated[str | None, typer.Option("--api-key", help="also MSTAR_API_KEY")]
Format = Annotated[str, typer.Option("-o", "--output", metavar="FORMAT", help="table, json or md")]


@app.command("run")
def run(
    ctx: typer.Context,
    model: ModelName = None,
    url: Url = None,
    served_model: ServedModelName = None,
    workload: WorkloadName = None,
    dataset: Dataset = None,
    params: Params = None,
    rate: Rate = None,
    arrivals: ArrivalKind = "poisson",
    concurrency: Clients = None,
    trace: Trace = None,
    speed: Speed = 1.0,
    requests: Requests = None,
    duration: Duration = None,
    warmup: WarmUp = None,
    ramp: Ramp = None,
    grace: Grace = "30s",
    seed: Seed = 0,
    slo: Slo = None,
    asserts: Asserts = None,
    allow_few: AllowFew = False,
    deadline: Deadline = "50ms",
    play_buffer: PlayBuffer = None,
    tokenizer: TokenizerPath = None,
    think: Think = None,
    period: Period = None,
    max_in_flight: MaxInFlight = 4096,
    timeout: Timeout = "120s",
    cancel_rate: CancelRate = None,
    processes: Processes = 1,
    protocol: Protocol = "generate",
    check: Check = True,
    out: Out = None,
    label: Label = None,
    live: IsLive = False,
    plain: IsPlain = False,
    fail_fast: FailFast = False,
    strict: Strict = False,
    expect_restarts: ExpectRestarts = False,
    keep_outputs: KeepOutputs = False,
    ready_timeout: ReadyTimeout = "60s",
    api_key: ApiKey = None,
    output: Format = "table",
) -> None:
    """Run one load test and write its result."""
    from mstarctl.bench.options import checked, run_options
    from mstarctl.bench.run import BenchRun, exit_code
    from mstarctl.bench.show.table import result_lines, result_markdown
    from mstarctl.bench.target import target_of

    printer = Printer.of(ctx)
    _check_format(output)
    checked(ctx.params)
    ready_s = parse_duration(ready_timeout, "--ready-timeout")
    with target_of(printer.options, model, url, api_key, ready_s, served_model) as target:
        options = run_options(ctx.params, target)
        with _display(printer, ctx) as display:
            facts = BenchRun(target, options, display).perform()
    _print(printer, output, facts, result_lines, result_markdown)
    printer.say(f"result: {options.out}")
    if (code := exit_code(facts, is_strict=strict)) != 0:
        raise typer.Exit(code)


SweepRate = Annotated[str | None, typer.Option("--rate", metavar="LIST|auto", help="1,2,4, 1..64:x2 or auto")]
SweepClients = Annotated[str | None, typer.Option("--concurrency", metavar="LIST", help="1,2,4 or 1..64:x2")]


@app.command("sweep")
def sweep(
    ctx: typer.Context,
    model: ModelName = None,
    url: Url = None,
    served_model: ServedModelName = None,
    workload: WorkloadName = None,
    dataset: Dataset = None,
    params: Params = None,
    rate: SweepRate = None,
    arrivals: ArrivalKind = "poisson",
    concurrency: SweepClients = None,
    duration: Duration = None,
    warmup: WarmUp = None,
    ramp: Ramp = None,
    grace: Grace = "30s",
    seed: Seed = 0,
    slo: Slo = None,
    first_clients: Annotated[
        int, typer.Option("--first-clients", min=2, help="with --rate auto: clients of the first doubling")
    ] = 2,
    knee: Annotated[float, typer.Option("--knee", min=0.01, max=1.0, help="least goodput / offered")] = 0.95,
    deadline: Deadline = "50ms",
    play_buffer: PlayBuffer = None,
    max_in_flight: MaxInFlight = 4096,
    timeout: Timeout = "120s",
    processes: Processes = 1,
    protocol: Protocol = "generate",
    check: Check = True,
    out: Out = None,
    label: Label = None,
    expect_restarts: ExpectRestarts = False,
    live: IsLive = False,
    plain: IsPlain = False,
    ready_timeout: ReadyTimeout = "60s",
    api_key: ApiKey = None,
    output: Format = "table",
) -> None:
    """Run several loads, or find the highest rate that meets the goals (--rate auto)."""
    from mstarctl.bench.options import checked, load_of, out_of, run_options, workload_for
    from mstarctl.bench.show.plot import sweep_plot
    from mstarctl.bench.show.table import sweep_markdown
    from mstarctl.bench.sweep import Sweep, points_of
    from mstarctl.bench.target import target_of

    printer = Printer.of(ctx)
    _check_format(output)
    if (rate is None) == (concurrency is None):
        raise UsageError("give --rate or --concurrency", hint="--rate auto, --rate 1,2,4 or --concurrency 1..64:x2")
    # Each point has its own load; the words of the command line give the rest.
    words = {**SWEEP_WORDS, **ctx.params, "rate": "1", "concurrency": None, "out": None}
    loads = [] if rate == "auto" else points_of(rate or concurrency or "", "--rate" if rate else "--concurrency")
    checked(words)
    ready_s = parse_duration(ready_timeout, "--ready-timeout")
    with target_of(printer.options, model, url, api_key, ready_s, served_model) as target:
        folder = out or out_of({**words, "label": label or "sweep"}, target, workload_for(words, target))
        folder.mkdir(parents=True, exist_ok=False)
        with _display(printer, ctx) as display:
            planned = Sweep(
                target,
                lambda path, **load: run_options(words, target, out=path, **load),
                folder,
                display,
                knee=knee,
                slo=slo or "",
                span_s=load_of(words).span_s or 0.0,
            )
            if rate == "auto":
                planned.auto(first_clients)
            else:
                planned.fixed(loads, is_open=rate is not None)
        facts = planned.write()
    _print(printer, output, facts, sweep_plot, sweep_markdown)
    printer.say(f"result: {folder}")
    is_disturbed = any(point["is_disturbed"] for point in facts["points"])
    if is_disturbed or not any(point["statuses"].get("ok") for point in facts["points"]):
        raise typer.Exit(ExitCode.ASSERTION)


@app.command("compare")
def compare(
    ctx: typer.Context,
    base: Annotated[Path | None, typer.Argument(metavar="[A]", help="a result, or a folder of results")] = None,
    changed: Annotated[Path | None, typer.Argument(metavar="[B]", help="the other one")] = None,
    threshold: Annotated[
        list[str] | None, typer.Option("--threshold", metavar="METRIC=5%", help="worse by more: exit 8; repeatable")
    ] = None,
    expect: Annotated[
        str, typer.Option("--expect", metavar="PARTS", help="differences under test: config,plugin,packages,source,…")
    ] = "",
    allow_env_diff: Annotated[bool, typer.Option("--allow-env-diff", help="compare whatever differs")] = False,
    run_a: Annotated[str | None, typer.Option("--run-a", metavar="WORDS", help="words of `bench run` for A")] = None,
    run_b: Annotated[str | None, typer.Option("--run-b", metavar="WORDS", help="words of `bench run` for B")] = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="with --run-a: runs of each, interleaved")] = 5,
    out: Out = None,
    live: IsLive = False,
    plain: IsPlain = False,
    output: Format = "table",
) -> None:
    """Compare two results: intervals of differences, and a verdict for each metric."""
    from mstarctl.bench.compare import compare as compared
    from mstarctl.bench.compare import comparison_facts, opened_side, parse_thresholds
    from mstarctl.bench.show.table import comparison_lines, comparison_markdown

    printer = Printer.of(ctx)
    _check_format(output)
    thresholds = parse_thresholds(threshold or [])
    is_run = run_a is not None and run_b is not None
    if is_run == (base is not None and changed is not None) or (run_a is None) != (run_b is None):
        raise UsageError("name two results, or --run-a and --run-b", hint="mstarctl bench compare base/ new/")
    if is_run:
        base, changed = _run_both(printer, ctx, (run_a or "", run_b or ""), repeat, out)
    assert base is not None
    assert changed is not None
    comparison = compared(
        opened_side(base),
        opened_side(changed),
        thresholds=thresholds,
        expected=[p for p in expect.split(",") if p],
        allows_differences=allow_env_diff or is_run,
    )
    _print(printer, output, comparison_facts(comparison), comparison_lines, comparison_markdown)
    if comparison.failed:
        raise typer.Exit(ExitCode.ASSERTION)


def _run_both(
    printer: Printer, ctx: typer.Context, words: tuple[str, str], repeat: int, out: Path | None
) -> tuple[Path, Path]:
    """Run both sides in turn, interleaved, and return their folders."""
    import shlex

    from mstarctl.bench.compare import order_of
    from mstarctl.bench.options import RESULTS, checked, run_options
    from mstarctl.bench.run import BenchRun
    from mstarctl.bench.target import target_of

    command = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]  # a group has commands
    sides = {}
    for name, text in zip("AB", words, strict=True):
        sides[name] = command.make_context("run", shlex.split(text), obj=ctx.obj).params
        checked(sides[name])
    folder = out or Path(RESULTS) / f"compare-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    for number, name in enumerate(order_of(repeat)):
        side = sides[name]
        ready_s = parse_duration(side["ready_timeout"], "--ready-timeout")
        where = (side["model"], side["url"], side["api_key"], ready_s, side["served_model"])
        with target_of(printer.options, *where) as target:
            options = run_options(side, target, out=folder / name / f"{number:02d}")
            with _display(printer, ctx) as display:
                display.say(f"{name}, run {number + 1} of {2 * repeat}")
                facts = BenchRun(target, options, display).perform()
        if facts["is_interrupted"]:
            raise KeyboardInterrupt
    return folder / "A", folder / "B"


@app.command("show")
def show(
    ctx: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a result, or a sweep")],
    by: Annotated[str, typer.Option("--by", help="node or status")] = "node",
    slowest: Annotated[int, typer.Option("--slowest", min=0, help="list this many of the slowest requests")] = 0,
    output: Format = "table",
) -> None:
    """Show a result, computed again from its raw data, or the points and the knee of a sweep."""
    from mstarctl.bench.conversation.stored import facts_of, lines_of
    from mstarctl.bench.result import ResultFolder
    from mstarctl.bench.show.again import again, by_status, slowest_lines
    from mstarctl.bench.show.plot import sweep_facts, sweep_plot
    from mstarctl.bench.show.table import result_lines, result_markdown, sweep_markdown

    printer = Printer.of(ctx)
    _check_format(output)
    if by not in ("node", "status"):
        raise UsageError(f"--by is {by!r}", hint=did_you_mean(by, ("node", "status")))
    if (sweep_found := sweep_facts(folder)) is not None:
        _print(printer, output, sweep_found, sweep_plot, sweep_markdown)
        return
    if (spoken := facts_of(folder)) is not None:
        _print(printer, output, spoken, lines_of, lambda facts: "\n".join(["```", *lines_of(facts), "```"]))
        return
    opened = ResultFolder.opened(folder)
    outcomes = opened.outcomes()
    facts = again(opened, outcomes)
    _print(printer, output, facts, result_lines, result_markdown)
    if output != "json":
        extra = by_status(outcomes) if by == "status" else []
        for line in [*extra, *(slowest_lines(opened, outcomes, slowest) if slowest else [])]:
            printer.text(line)


@app.command("plot")
def plot(
    ctx: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a result, or a sweep")],
    what: Annotated[
        str | None, typer.Option("--what", help="cdf, timeline, nodes, buffer, sweep, or a metric such as itl")
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="write a PNG in place of the drawing")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="write an SVG in place of the drawing")
    ] = None,
) -> None:
    """Draw a result in the terminal, or write it as SVG or PNG."""
    from mstarctl.bench.show.chart import drawn
    from mstarctl.bench.show.picture import svg as svg_of
    from mstarctl.bench.show.picture import write_png
    from mstarctl.bench.show.plot import chart_of

    printer = Printer.of(ctx)
    chart = chart_of(folder, what)
    if svg is not None:
        svg.write_text(svg_of(chart))
    if png is not None:
        write_png(chart, png)
    for path in filter(None, (svg, png)):
        printer.say(f"wrote {path}")
    if svg is None and png is None:
        for line in drawn(chart, width=min(120, shutil.get_terminal_size((100, 24)).columns)):
            printer.text(line)


@app.command("report")
def report(
    ctx: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a result, or a sweep")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE.html", help="default: report.html in the folder")
    ] = None,
) -> None:
    """Write a result or a sweep as one HTML page with its charts, which needs no network."""
    from mstarctl.bench.show.report import report as report_of

    printer = Printer.of(ctx)
    page = report_of(folder)
    path = out or (folder if folder.is_dir() else folder.parent) / "report.html"
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written", error.strerror or "", file=str(path)) from error
    printer.say(f"wrote {path}")


@app.command("workloads")
def workloads(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="print its first requests")] = None,
    model: Annotated[str | None, typer.Option("--model", help="of this model only")] = None,
    count: Annotated[int, typer.Option("--count", min=1, help="requests to print")] = 3,
    seed: Seed = 0,
) -> None:
    """List the workloads of the installed models, or print the first requests of one."""
    from mstarctl.bench.show.workloads import requests_of, workload_items

    printer = Printer.of(ctx)
    if name is None:
        columns = (Column("WORKLOAD", "name"), Column("MODELS", "models"), Column("TITLE", "title"))
        printer.items("workload", workload_items(model), columns)
        return
    for item in requests_of(name, model, count, seed):
        printer.text(json.dumps(item, ensure_ascii=False))


@app.command("selftest")
def selftest(
    ctx: typer.Context,
    processes: Processes = 1,
    inject: Annotated[str | None, typer.Option("--inject", help="find a known delay: 50ms")] = None,
    inject_stall: Annotated[
        str | None, typer.Option("--inject-stall", metavar="LENGTH@TIME", help="find a known stall: 2s@3s")
    ] = None,
) -> None:
    """Measure the client itself against a server that does nothing."""
    from mstarctl.bench.selftest import self_test

    printer = Printer.of(ctx)
    rows = self_test(processes, inject, inject_stall)
    words = {None: "", True: "found", False: "NOT FOUND"}
    items = [{"name": row.name, "found": row.found, "result": words[row.is_right], "per_s": row.per_s} for row in rows]
    printer.items("selftest", items, (Column("CASE", "name"), Column("MEASURED", "found"), Column("", "result")))
    if any(row.is_right is False for row in rows):
        raise typer.Exit(ExitCode.ASSERTION)


def _check_format(output: str) -> None:
    if output not in FORMATS:
        raise UsageError(f"unknown output format {output!r}", hint=did_you_mean(output, FORMATS))


def _display(printer: Printer, ctx: typer.Context) -> Display:
    from mstarctl.bench.show.display import Display

    return Display.chosen(
        live=ctx.params["live"],
        plain=ctx.params["plain"],
        quiet=printer.options.quiet,
        is_coloured=printer.options.is_coloured(sys.stderr),
    )


def _print(printer: Printer, output: str, facts: dict[str, Any], lines: Any, markdown: Any) -> None:
    """Print a result on stdout in the format of -o."""
    if output == "json":
        printer.text(json.dumps(facts, indent=1))
        return
    from mstarctl.bench.show.table import is_loud

    for line in (markdown if output == "md" else lines)(facts):
        printer.text(printer.paint(line, "bad") if is_loud(line) else line)
