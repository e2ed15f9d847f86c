"""docs/admin-api.md matches the code: generated parts are current, and no endpoint is missing."""

from __future__ import annotations

import re
from pathlib import Path

from mstar_core.admin.endpoints import ENDPOINTS
from mstar_core.observe.filter import NUMBER_FIELDS, TEXT_FIELDS
from mstar_core.observe.frames import ITEM_TYPES
from tests.fakes.script import script

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "admin-api.md"


def test_the_generated_parts_are_those_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, make in script("docs_admin").ADMIN_PARTS.items():
        assert f"<!-- generated: {name} -->\n{make().strip()}\n" in page, f"{name} is stale: run make docs"


def test_every_endpoint_object_and_filter_field_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"`{endpoint.method} {endpoint.path}`" in page for endpoint in ENDPOINTS)
    assert all(f"### {part}\n" in page for part in ITEM_TYPES)
    assert all(f"`{field}`" in page for field in (*TEXT_FIELDS, *NUMBER_FIELDS))


def test_every_event_is_on_the_page() -> None:
    """Event types are literals in the code, or states of a deployment."""
    section = PAGE.read_text(encoding="utf-8").partition("## Events\n")[2].partition("## Metrics\n")[0]
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "mstar_core").rglob("*.py"))
    kinds = set(re.findall(r'events\.add\(\s*"([\w.]+)"', code)) | {"kv.preempt", "api.refused"}
    assert "child.died" in kinds and "phase" in kinds
    states = set(re.findall(r'_set_state\(\s*"(\w+)"', code))
    assert {"ready", "degraded", "draining", "failed"} <= states
    for kind in sorted(kinds):
        family, _, last = kind.partition(".")
        assert f"`{kind}`" in section or (family == "deployment" and f"`.{last}`" in section), kind
    for state in sorted(states):
        assert f"`.{state}`" in section, state
