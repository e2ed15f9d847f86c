"""Gateway as `describe` shows it: its head and its models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mstarctl.client import Known
from mstarctl.output.units import age_text, size_text


def gateway_item(known: Known) -> dict[str, Any]:
    """Return a gateway as data: its head and its models."""
    models = known.snapshot.get("models", [])
    return {"name": known.name, "state": known.state, "pid": known.pid, **known.head, "models": models}


def gateway_lines(known: Known) -> Iterator[str]:
    """Return a gateway as lines of text."""
    item = gateway_item(known)
    yield f"{known.name}  {known.state}" + (f"  {age_text(item['age_s'])}" if item.get("age_s") is not None else "")
    facts = {
        "reason": item.get("reason"),
        "url": item.get("endpoint"),
        "load": f"{item.get('running') or 0} running, {item.get('waiting') or 0} waiting",
        "file": item.get("config") or "none; it serves running deployments",
        "logs": item.get("log_dir"),
        "pid": item.get("pid"),
    }
    yield from (f"  {label:<9} {value}" for label, value in facts.items() if value)
    yield "models" if item["models"] else "no models; start one with: mstarctl up MODEL"
    yield from map(_model_line, item["models"])


def _model_line(model: Mapping[str, Any]) -> str:
    """Return `omni  ready  2 running, 0 queued  14.0 GiB of cuda:0  at http://127.0.0.1:8001`."""
    held = ", ".join(f"{size_text(size)} of {device}" for device, size in sorted(model.get("held", {}).items()))
    where = ", ".join(each["url"] for each in model["replicas"])
    words = [
        f"{model['name']:<12} {model['state']:<8}",
        f"{model['running']} running, {model['queued']} queued",
        held,
        f"at {where}" if where else "",
        model.get("reason", ""),
    ]
    return "  " + "  ".join(word for word in words if word)
