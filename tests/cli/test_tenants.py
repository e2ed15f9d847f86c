"""`mstarctl tenants` and `usage`: keys are shown once, limits are checked, usage is read with nothing running."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mstar_core.gateway.tenants import books
from mstar_core.gateway.tenants.accounts.directory import Directory
from mstar_core.gateway.tenants.accounts.folder import gateway_folder
from mstar_core.gateway.tenants.accounts.tenant_file import TenantFile
from mstar_core.gateway.tenants.accounts.terms import Terms
from mstar_core.gateway.tenants.books import Entry
from mstar_core.gateway.tenants.figures import Figures, UsageReport
from mstar_core.gateway.tenants.store import opened, transact
from tests.cli.conftest import Cli

TODAY = datetime.now(UTC).timestamp()
DAY_S = 86_400


def use(tenant: str, model: str, tokens: int, at: float = TODAY, *, is_running: bool = False) -> None:
    """Book one request."""
    db = opened(gateway_folder())
    terms, request = Terms(name=tenant), f"{tenant}{model}{at}"
    entry = Entry(request=request, gateway="g", terms=terms, key="k1", model=model, route="/", tokens=0, audio_s=None)
    number, _ = transact(db, lambda db: books.admit(db, entry, at))
    if not is_running:
        report = UsageReport(id=request, request=request, deployment="", figures=Figures(output_tokens=tokens))
        transact(db, lambda db: books.book(db, [report]))
        transact(db, lambda db: books.close(db, number, 200, at))
    db.close()


def test_a_tenant_is_created_with_a_key_that_is_shown_once(cli: Cli) -> None:
    added = cli("tenants", "add", "acme", "--model", "orpheus", "--requests-per-minute", "60", "--weight", "2.5")
    assert added.code == 0 and "not shown again" in added.err
    caller = Directory(TenantFile(gateway_folder())).caller(added.out.strip())
    assert caller.terms == Terms(name="acme", models=("orpheus",), requests_per_minute=60, weight=2.5)
    shown = cli("tenants", "ls", "-o", "json").json["items"]
    assert shown[0]["name"] == "acme" and shown[0]["valid_keys"] == 1 and shown[0]["tokens_per_day"] is None
    assert added.out.strip() not in cli("tenants", "keys", "-o", "json").out


def test_a_key_is_rotated_and_revoked(cli: Cli) -> None:
    first = cli("tenants", "add", "acme").out.strip()
    second = cli("tenants", "key", "acme", "--rotate", "0s", "--note", "laptop").out.strip()
    directory = Directory(TenantFile(gateway_folder()))
    assert directory.caller(second).terms.name == "acme"
    keys = cli("tenants", "keys", "acme", "-o", "json").json["items"]
    assert [key["state"] for key in keys] == ["revoked", "valid"] and keys[1]["note"] == "laptop"
    assert cli("tenants", "revoke", keys[1]["name"][:6]).code == 0
    for key in (first, second):
        with pytest.raises(Exception, match="API key is wrong"):
            directory.caller(key)


def test_limits_are_changed_and_removed(cli: Cli) -> None:
    cli("tenants", "add", "acme", "--tokens-per-day", "1000", "--concurrency", "4", "--model", "a")
    assert cli("tenants", "set", "acme", "--tokens-per-day", "none", "--concurrency", "8", "--model", "*").code == 0
    terms = TenantFile(gateway_folder()).read()["acme"].terms
    assert terms == Terms(name="acme", concurrency=8)


@pytest.mark.parametrize(
    "words",
    [
        ("--tokens-per-day", "many"),
        ("--concurrency", "0"),
        ("--weight", "none"),
        ("--requests-per-minute", "1.5"),
        ("--audio-seconds-per-day", "nan"),
    ],
)
def test_an_invalid_limit_is_named(cli: Cli, words: tuple[str, str]) -> None:
    said = cli("tenants", "add", "acme", *words)
    assert said.code == 2 and words[0] in said.err and not TenantFile(gateway_folder()).read()


def test_unknown_tenants_and_keys_are_named(cli: Cli) -> None:
    assert "mstarctl tenants add" in cli("tenants", "key", "acme").err
    cli("tenants", "add", "acme")
    said = cli("tenants", "rm", "acne", "--yes")
    assert said.code == 4 and "acme" in said.err
    assert cli("tenants", "revoke", "123").code == 4


def test_a_tenant_of_a_serve_file_gets_keys(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text("tenants:\n  lab:\n    weight: 2\n")
    said = cli("tenants", "key", "lab", "--file", "serve.yaml")
    assert said.code == 0 and said.out.strip()
    assert cli("tenants", "key", "lap", "--file", "serve.yaml").code == 4


def test_usage_is_summed_by_the_chosen_groups(cli: Cli) -> None:
    use("acme", "orpheus", 10)
    use("acme", "bagel", 5)
    use("lab", "orpheus", 7)
    use("lab", "orpheus", 0, is_running=True)
    by_tenant = cli("usage", "--by", "tenant", "-o", "json").json["items"]
    assert [(item["tenant"], item["requests"], item["output_tokens"]) for item in by_tenant] == [
        ("acme", 2, 15),
        ("lab", 2, 7),
    ]
    assert by_tenant[1]["running"] == 1
    only = cli("usage", "--model", "orpheus", "--tenant", "acme", "-o", "json").json["items"]
    assert [item["output_tokens"] for item in only] == [10]
    total = cli("usage", "--by", "", "-o", "json").json["items"]
    assert [(item["name"], item["output_tokens"]) for item in total] == [("all", 22)]


def test_usage_of_days(cli: Cli) -> None:
    use("acme", "m", 1, TODAY)
    use("acme", "m", 2, TODAY - DAY_S)
    use("acme", "m", 4, TODAY - 40 * DAY_S)
    tokens = {
        words: sum(item["output_tokens"] for item in cli("usage", *words, "-o", "json").json["items"])
        for words in [(), ("--day", "today"), ("--day", "yesterday"), ("--since", "2d"), ("--since", "2020-01-01")]
    }
    assert list(tokens.values()) == [3, 1, 2, 3, 7]
    by_day = cli("usage", "--by", "day", "--since", "2d", "-o", "json").json["items"]
    assert [item["day"] for item in by_day] == [
        datetime.fromtimestamp(TODAY - DAY_S, UTC).date().isoformat(),
        datetime.fromtimestamp(TODAY, UTC).date().isoformat(),
    ]


def test_usage_as_csv_and_table(cli: Cli) -> None:
    use("acme", "m", 5)
    (row,) = csv.DictReader(io.StringIO(cli("usage", "--csv").out))
    assert (row["tenant"], row["model"], row["output_tokens"]) == ("acme", "m", "5")
    table = cli("usage").out
    assert "TOKENS OUT" in table and "AUDIO OUT s" not in table


@pytest.mark.parametrize("words", [("--by", "tennant"), ("--day", "tomorrow"), ("--day", "today", "--since", "7d")])
def test_faults_of_usage_name_the_way_out(cli: Cli, words: tuple[str, ...]) -> None:
    assert cli("usage", *words).code == 2


def test_no_usage_is_no_error(cli: Cli) -> None:
    said = cli("usage")
    assert said.code == 0 and "no requests came through a gateway" in said.err and not gateway_folder().exists()
