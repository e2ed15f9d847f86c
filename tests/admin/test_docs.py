"""docs/admin-api.md says what the code does: each of its generated parts is current, and no endpoint is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from mstar_core.admin.endpoints import ENDPOINTS
from mstar_core.observe.filter import NUMBER_FIELDS, TEXT_FIELDS
from mstar_core.observe.frames import ITEM_TYPES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "admin-api.md"


def parts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_admin", ROOT / "scripts" / "docs_admin.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generated_parts_are_those_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, make in parts().ADMIN_PARTS.items():
        assert f"<!-- generated: {name} -->\n{make().strip()}\n" in page, f"{name} is stale: run make docs"


def test_every_endpoint_object_and_filter_field_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"`{endpoint.method} {endpoint.path}`" in page for endpoint in ENDPOINTS)
    assert all(f"### {part}\n" in page for part in ITEM_TYPES)
    assert all(f"`{field}`" in page for field in (*TEXT_FIELDS, *NUMBER_FIELDS))
