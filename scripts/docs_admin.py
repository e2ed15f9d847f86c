"""Generated parts of docs/admin-api.md: endpoints, frames and objects, fields of filters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any


def table(head: tuple[str, ...], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)])


def endpoints() -> str:
    """Return the list of endpoints with their query parameters and bodies."""
    from mstar_core.admin.endpoints import ENDPOINTS

    def section(endpoint: Any) -> Iterator[str]:
        status = "" if endpoint.status == 200 else f" Answers {endpoint.status}."
        errors = f" Errors: {', '.join(map(str, endpoint.errors))}." if endpoint.errors else ""
        kind = " NDJSON." if endpoint.lines else ""
        yield f"`{endpoint.method} {endpoint.path}`: {endpoint.doc}{kind}{status}{errors}\n"
        for where, fields in (("?", endpoint.parameters), ("body", endpoint.body)):
            for each in fields:
                yield f"- `{each.name}` ({where}): {each.doc}"
        if endpoint.parameters or endpoint.body:
            yield ""

    return "\n".join(line for endpoint in ENDPOINTS for line in section(endpoint))


def objects() -> str:
    """Return the objects of a snapshot: docstring and fields of each."""
    from mstar_core.observe import frames

    kinds = {"deployment": frames.DeploymentStatus, **frames.ITEM_TYPES}

    def section(part: str, kind: type[Any]) -> str:
        fields = ", ".join(f"`{name}`" for name in kind.__struct_fields__)
        return f"### {part}\n\n{words(kind)}\n\n{fields}\n"

    return "\n".join(section(part, kind) for part, kind in kinds.items())


def frame_kinds() -> str:
    """Return the table of the frames of a watch."""
    from mstar_core.observe import frames

    kinds = {
        "hello": frames.HelloFrame,
        "snapshot": frames.SnapshotFrame,
        "delta": frames.DeltaFrame,
        "event": frames.EventFrame,
        "beat": frames.BeatFrame,
        "resync": frames.ResyncFrame,
    }
    return table(("`k`", "meaning"), ((f"`{name}`", words(kind)) for name, kind in kinds.items()))


def filter_fields() -> str:
    """Return the table of filter fields."""
    from mstar_core.observe.filter import FLAGS, NUMBER_FIELDS, TEXT_FIELDS

    rows = [
        ("a glob, `field:glob`", ", ".join(f"`{name}`" for name in TEXT_FIELDS)),
        ("a comparison, `field>5` and `>=`, `<`, `<=`, `=`", ", ".join(f"`{name}`" for name in NUMBER_FIELDS)),
        ("flags", ", ".join(f"`{name}`" for name in FLAGS)),
    ]
    return table(("kind", "fields"), rows)


def words(kind: type[Any]) -> str:
    """Return a class's docstring as one paragraph."""
    return re.sub(r"\s+", " ", (kind.__doc__ or "").strip())


ADMIN_PARTS: dict[str, Callable[[], str]] = {
    "admin-endpoints": endpoints,
    "admin-filter": filter_fields,
    "admin-frames": frame_kinds,
    "admin-objects": objects,
}
