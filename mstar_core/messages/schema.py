"""JSON schema of the wire format, generated from the message types and written to docs/wire/ by `make docs`."""

from __future__ import annotations

from typing import Any

import msgspec

from mstar_core.messages.wire import WIRE_VERSION, Envelope


def wire_schema() -> dict[str, Any]:
    """Return the JSON schema (2020-12) of an envelope and of every message. MessagePack follows it one to one.

    Byte strings are MessagePack `bin`, shown as strings with `contentEncoding`. The field `type` is the tag of a union.
    """
    (root,), components = msgspec.json.schema_components([Envelope], ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mstarctl wire format",
        "version": WIRE_VERSION,
        **root,
        "$defs": dict(sorted(components.items())),
    }
