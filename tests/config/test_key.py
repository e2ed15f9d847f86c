"""Declaration of configuration keys on fields: what follows from one of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final, get_args, get_type_hints

import msgspec
import pytest

from mstar_core.config.key import LIVE, REREAD, ConfigKey, settings_of
from mstar_core.config.resolved import ResolvedConfig
from mstar_core.config.schema import SECTIONS, SETTINGS, values_of, words_of

ROOT = Path(__file__).resolve().parents[2]
PLANNING: Final = ("mstar_core/config", "mstarctl/start", "mstarctl/authoring")
READ_BY_CHILDREN_ALONE: Final = (
    *("max_queue", "token_budget", "image_share", "feature_cache_bytes", "wait_spin_us", "hang_s", "step_limit_s"),
    *("share_between_keys", "prefix_cache", "keep_starts", "unknown_params", "stall_timeout_s", "max_body_bytes"),
    *("standby", "max_files", "max_speech_chars", "max_n", "max_connections", "max_image_pixels", "max_video_frames"),
    *("yield_to_sound", "first_sound_requests", "steps_at_once"),
)
"""Keys whose values neither a check of a file nor the planner reads."""


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    pages: Annotated[int | None, ConfigKey("Pages of the pool.", ge=1, le=64)] = None
    kind: Annotated[str, ConfigKey("Kind.", choices=("near", "far"))] = "near"
    secret: str = ""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    ranks: Annotated[tuple[int, ...], ConfigKey("Ranks.", is_required=True)]


class File(msgspec.Struct, frozen=True, kw_only=True):
    keys: Annotated[str | None, ConfigKey("File of keys.", is_reread=True)] = None
    length: Annotated[int, ConfigKey("Length.", default=None, default_text="the model's")] = 8
    options: Annotated[dict[str, int], ConfigKey("Options.")] = msgspec.field(default_factory=dict)
    groups: Annotated[tuple[Group, ...], ConfigKey("Groups.")] = ()
    cache: Annotated[Cache, ConfigKey("The pool.")] = Cache()


def test_the_keys_of_a_record_follow_from_its_fields() -> None:
    settings = {item.key: item for item in settings_of(File)}
    assert {key: item.kind for key, item in settings.items()} == {
        "keys": "string",
        "length": "integer",
        "options": "mapping",
        "groups": "list of section",
        "groups[].ranks": "list of integer",
        "cache": "section",
        "cache.pages": "integer",
        "cache.kind": "string",
    }
    pages, kind = settings["cache.pages"], settings["cache.kind"]
    assert (pages.nullable, pages.default, pages.allowed) == (True, None, "integer >= 1 and <= 64")
    assert (kind.nullable, kind.default, kind.allowed) == (False, "near", "one of near, far")
    assert (settings["length"].default, settings["options"].default, settings["cache"].default) == (None, {}, None)
    assert settings["groups[].ranks"].required and not settings["groups"].required


def test_a_key_that_a_reload_reads_again_says_so() -> None:
    again = {item.key for item in SETTINGS if item.is_reread}
    servers = {f"api.realtime_ice_servers[].{word}" for word in ("credential_file", "secret_file")}
    assert again == {"api.api_key_file", "api.metrics_key_file", "api.tls_cert", "api.tls_key", *servers}
    assert all(item.doc.endswith(REREAD) == item.is_reread for item in SETTINGS)


def test_a_key_that_changes_live_says_so() -> None:
    assert {"max_queue", "max_concurrent_requests", "api.timeout_s"} <= {i.key for i in SETTINGS if i.is_live}
    assert all(item.doc.endswith(LIVE) == item.is_live for item in SETTINGS)


def test_every_value_of_the_record_has_its_key_by_the_same_name() -> None:
    config = ResolvedConfig(model="m", name="n", model_kwargs={"layers": 2})
    values = values_of(config)
    assert values["max_queue"] == config.max_queue and values["model_kwargs.layers"] == 2
    for section, record in SECTIONS.items():
        declared = {name for name, hint in get_type_hints(record, include_extras=True).items() if get_args(hint)}
        assert set(words_of(section)) <= declared
        assert all(values[f"{section}.{word}"] is not Ellipsis for word in words_of(section))


@pytest.mark.parametrize("word", ["api_keys", "keys_in_file", "metrics_keys"])
def test_secrets_are_no_keys(word: str) -> None:
    config = ResolvedConfig(model="m", name="n")
    assert f"api.{word}" not in values_of(config) and word not in words_of("api")


@pytest.mark.parametrize("word", READ_BY_CHILDREN_ALONE)
def test_a_key_is_declared_in_one_file_and_passed_on_without_its_name(word: str) -> None:
    files = [path for folder in PLANNING for path in (ROOT / folder).rglob("*.py")]
    naming = {path.name for path in files if re.search(rf"\b{word}\b", path.read_text(encoding="utf-8"))}
    assert naming == {"resolved.py"}
