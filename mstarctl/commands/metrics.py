"""`mstarctl metrics`: prints every metric of a deployment in Prometheus text format."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Final

import typer

from mstar_core.errors import UsageError
from mstarctl.client.reach import reached
from mstarctl.complete import DeploymentName
from mstarctl.output import Column, Printer

SAMPLE: Final = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?")
LABEL: Final = re.compile(r'(?P<key>\w+)="(?P<value>(?:[^"\\]|\\.)*)"')
ESCAPED: Final = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
COLUMNS: Final = (Column("METRIC", "name"), Column("LABELS", "labels_text"), Column("VALUE", "value", is_right=True))


def metrics(
    ctx: typer.Context,
    name: DeploymentName = None,
    match: Annotated[str, typer.Option("--match", metavar="RE", help="only metrics whose name matches")] = "",
) -> None:
    """Print every metric in Prometheus text format."""
    printer = Printer.of(ctx)
    pattern = compiled(match)
    with reached(printer.options, name, takes_gateways=True) as target:
        text = target.admin.text("/v1/metrics")
    if printer.format == "table":
        for line in text.splitlines():
            if pattern.search(metric_of(line)):
                printer.text(line)
        return
    items = [item for item in samples(text) if pattern.search(item["name"])]
    for item in items:
        item["labels_text"] = " ".join(f"{key}={value}" for key, value in item["labels"].items())
    if printer.is_machine:
        items = [{key: value for key, value in item.items() if key != "labels_text"} for item in items]
    printer.items("metric", items, COLUMNS)


def compiled(text: str) -> re.Pattern[str]:
    """Compile a regular expression. Raises UsageError."""
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(f"--match {text!r} is not a regular expression", str(error)) from error


def metric_of(line: str) -> str:
    """Return the metric name of a line; comments have it as their third word."""
    if line.startswith("#"):
        return [*line.split(maxsplit=3), "", "", ""][2]
    return line.partition("{")[0].partition(" ")[0]


def samples(text: str) -> Iterator[dict[str, Any]]:
    """Parse the samples of the Prometheus text format."""
    for line in text.splitlines():
        sample = None if line.startswith("#") else SAMPLE.fullmatch(line.strip())
        if sample is None:
            continue
        labels = {label["key"]: unescaped(label["value"]) for label in LABEL.finditer(sample["labels"] or "")}
        yield {"name": sample["name"], "labels": labels, "value": _number(sample["value"])}


def unescaped(text: str) -> str:
    """Return the value of a label without escapes."""
    return re.sub(r"\\[\\\"n]", lambda match: ESCAPED[match[0]], text)


def _number(text: str) -> float | None:
    value = float(text)
    return value if value == value and abs(value) != float("inf") else None
