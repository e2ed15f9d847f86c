"""serve.yaml: its values, their forms, and faults with file, line and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstar_core.config.files.parse import parse
from mstar_core.config.sizes import parse_size
from mstar_core.errors import ConfigError
from mstar_core.gateway.serve_file import ServeFile, hosts_of, load_serve_file, read_entry, read_serve
from mstar_core.gateway.serve_values import Keep, KeepKind, Replicas, parse_keep, parse_replicas

WHOLE = """
host: 0.0.0.0
port: 9000
hosts: [local, gpu7]
memory: {gpu: 70GiB, host: 1.5 GB}
models:
  llm: llm:mini
  omni:
    target: configs/omni.yaml
    weights: weights
    gpus: "0"
    keep: idle 1h30m
    replicas: 1..4
    hosts: [gpu8, local]
    memory: 20GiB
    aliases: [qwen]
    set: {max_seq_len: 4096}
    tenants: [one]
  far: {url: "https://far:8443"}
tenants:
  one: {models: [omni], tokens_per_day: 1000, weight: 2}
"""


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(WHOLE)
    serve = load_serve_file(path)
    omni = serve.models["omni"]
    assert (serve.host, serve.port, serve.memory.gpu_bytes, serve.memory.host_bytes) == (
        "0.0.0.0",
        9000,
        70 << 30,
        1_500_000_000,
    )
    assert serve.models["llm"].target == "llm:mini" and serve.models["llm"].keep.kind is KeepKind.ON_DEMAND
    assert omni.target == str(tmp_path / "configs" / "omni.yaml") and omni.weights == str(tmp_path / "weights")
    assert (omni.keep, omni.replicas, omni.memory_text) == (Keep(KeepKind.IDLE, 5400.0), Replicas(1, 4), "20GiB")
    assert (omni.set, omni.aliases, omni.tenants) == ({"max_seq_len": 4096}, ("qwen",), ("one",))
    assert hosts_of(omni, serve) == ("gpu8", "local") and hosts_of(serve.models["llm"], serve) == ("local", "gpu7")
    assert hosts_of(omni, ServeFile()) == ("gpu8", "local") and hosts_of(serve.models["llm"], ServeFile()) == ("local",)
    assert omni.source.endswith("serve.yaml:8")
    assert serve.tenants["one"].tokens_per_day == 1000 and serve.tenants["one"].weight == 2.0
    assert not serve.discovers and serve.needs_key
    assert ServeFile.decode(serve.encode()) == serve


def test_without_models_running_deployments_are_served() -> None:
    assert ServeFile().discovers and not ServeFile().needs_key


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("port: 1\nmodles: {}\n", 2, ("modles", "did you mean 'models'?")),
        ("models:\n  a: {target: x, kep: always}\n", 2, ("models.a.kep", "did you mean 'keep'?")),
        ("models:\n  a: {target: x, keep: idle}\n", 2, ("models.a.keep", "idle 10m")),
        ("models:\n  a: {target: x, keep: idle 0x}\n", 2, ("models.a.keep",)),
        ("models:\n  a: {target: x, replicas: 4..1}\n", 2, ("models.a.replicas", "1..4")),
        ("models:\n  a: {target: x, memory: 20 gigs}\n", 2, ("models.a.memory", "20GiB")),
        ("models:\n  a: {keep: always}\n", 2, ("models.a", "add target")),
        ("models:\n  a: {url: 'http://x', gpus: '0'}\n", 2, ("models.a", "remove gpus, or url")),
        ("models:\n  a: {url: 'http://x', hosts: [gpu7]}\n", 2, ("models.a", "remove hosts, or url")),
        ("models:\n  a: {target: x, hosts: gpu7}\n", 2, ("models.a.hosts",)),
        ("models:\n  a: {url: 'far:80'}\n", 2, ("models.a.url", "http://HOST:PORT")),
        ("models:\n  a b: x\n", 2, ("'a b'", "letters")),
        ("models:\n  orpheus:mini: {keep: always}\n", 2, ("`orpheus: orpheus:mini`",)),
        ("models:\n  a: x\n  b: {target: y, aliases: [a]}\n", 3, ("'a' names",)),
        ("models:\n  a: {target: x, tenants: [two]}\ntenants:\n  too: {}\n", 2, ("'two'", "did you mean 'too'?")),
        ("models:\n  omni: x\ntenants:\n  t: {models: [omnj]}\n", 4, ("'omnj'", "did you mean 'omni'?")),
        ("tenants:\n  t: {tokens_per_day: 0}\n", 2, ("tenants.t.tokens_per_day", ">= 1")),
        ("tls_cert: a.pem\n", 1, ("tls_cert", "belong together")),
        ("models: [a]\n", 1, ("models is a list",)),
        ("- a\n", 1, ("must contain a mapping",)),
    ],
)
def test_a_fault_names_its_place(text: str, line: int, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_serve(parse(text, "serve.yaml"))
    assert (caught.value.facts["file"], caught.value.facts["line"]) == ("serve.yaml", line)
    for word in words:
        assert word in str(caught.value)


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match="2 faults"):
        read_serve(parse("port: x\nmodels:\n  a: {keep: never, target: x}\n", "serve.yaml"))


def test_an_entry_is_read_alone() -> None:
    assert (
        read_entry("llm", parse('{"target": "llm:mini", "keep": "always"}', "serve add")).keep.kind is KeepKind.ALWAYS
    )
    with pytest.raises(ConfigError, match="unknown key"):
        read_entry("llm", parse('{"targets": "x"}', "serve add"))


SIZES = {"0": 0, "4096": 4096, "2 KiB": 2048, "1.5GiB": 3 << 29, "3MB": 3_000_000}


@pytest.mark.parametrize(("text", "size"), SIZES.items())
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 XB", "1e9", "inf"])
def test_texts_that_are_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match=r"^.*$"):
        parse_size(text)


def test_forms_of_keep_and_replicas() -> None:
    assert parse_keep("idle 90s").idle_s == 90.0 and parse_keep("always") == Keep(KeepKind.ALWAYS)
    assert parse_replicas("2") == Replicas(2, 2) and parse_replicas("1..64") == Replicas(1, 64)
    for wrong in ("0", "1..65", "a", "1...2"):
        with pytest.raises(ValueError, match=r".*"):
            parse_replicas(wrong)
