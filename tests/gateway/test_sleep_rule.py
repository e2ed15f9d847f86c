"""Models that can sleep, by serve.yaml, and the caution of a `keep` that needs a sleep."""

from __future__ import annotations

import pytest

from mstar_core.config.files.parse import parse
from mstar_core.errors import ConfigError
from mstar_core.gateway.serve_file import ServeFile, read_serve
from mstar_core.gateway.sleep_rule import can_sleep, caution_of

MODELS = """
models:
  plain: {target: bagel, keep: idle 10m}
  chosen: {target: bagel, keep: idle 10m, sleepable: true}
  barred: {target: bagel, keep: idle 10m, sleepable: false}
  inner: {target: bagel, set: {sleepable: true}}
  cpu: {target: bagel, device: cpu, keep: idle 10m}
  file: {target: bagel.yaml, keep: idle 10m}
  far: {url: "http://far"}
"""


def sleepers(serve: ServeFile, *, has_gpu: bool) -> dict[str, bool | None]:
    return {entry.name: can_sleep(entry, serve, has_gpu=has_gpu) for entry in serve.models.values()}


def test_models_sleep_but_where_a_line_or_their_own_file_says_otherwise() -> None:
    serve = read_serve(parse(MODELS, "serve.yaml"))
    known = {"plain": True, "chosen": True, "barred": False, "inner": True, "cpu": True, "file": None, "far": None}
    assert sleepers(serve, has_gpu=True) == known
    without = sleepers(serve, has_gpu=False)
    assert without.pop("far") is None and set(without.values()) == {True}


def test_one_line_decides_for_all_models_but_those_that_say_otherwise() -> None:
    serve = read_serve(parse(f"sleepable: true\n{MODELS}", "serve.yaml"))
    assert [name for name, can in sleepers(serve, has_gpu=True).items() if can is False] == ["barred"]
    serve = read_serve(parse(f"sleepable: false\n{MODELS}", "serve.yaml"))
    assert [name for name, can in sleepers(serve, has_gpu=True).items() if can] == ["chosen", "inner", "cpu"]


def test_a_rule_that_needs_a_sleep_names_the_line_that_allows_it() -> None:
    serve = read_serve(parse(MODELS, "serve.yaml"))
    caution = caution_of(serve.models["plain"], False)
    assert "keep is idle 10m" in caution and "it ends instead" in caution and "sleepable: true" in caution
    assert caution_of(serve.models["plain"], None) == "" == caution_of(serve.models["plain"], True)
    assert caution_of(serve.models["inner"], False) == "", "on_demand needs no sleep at a certain time"


def test_a_model_names_its_sleep_once() -> None:
    with pytest.raises(ConfigError, match="names sleepable twice"):
        read_serve(parse("models:\n  a: {target: x, sleepable: true, set: {sleepable: false}}\n", "serve.yaml"))
