"""`mstarctl tenants`: creates tenants of gateways, their limits and their keys, in the gateway's state folder."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from mstar_core.errors import NotFound, UsageError, did_you_mean
from mstar_core.gateway.serve_file import load_serve_file
from mstar_core.gateway.tenants.accounts.folder import gateway_folder
from mstar_core.gateway.tenants.accounts.keys import KeyRecord
from mstar_core.gateway.tenants.accounts.tenant_file import StoredTenant, TenantFile
from mstar_core.gateway.tenants.accounts.terms import Terms
from mstarctl.output import Column, Printer
from mstarctl.output.durations import parse_duration
from mstarctl.output.moments import iso_time

COLUMNS: Final = (
    Column("NAME", "name"),
    Column("MODELS", "models"),
    Column("REQ/min", "requests_per_minute", is_right=True),
    Column("TOKENS/day", "tokens_per_day", is_right=True),
    Column("AUDIO s/day", "audio_seconds_per_day", is_right=True),
    Column("AT ONCE", "concurrency", is_right=True),
    Column("WEIGHT", "weight", is_right=True),
    Column("KEYS", "valid_keys", is_right=True),
)
KEY_COLUMNS: Final = (
    Column("KEY", "name"),
    Column("TENANT", "tenant"),
    Column("STATE", "state"),
    Column("CREATED", "created_at"),
    Column("ENDS", "ends_at"),
    Column("NOTE", "note"),
)
UNLIMITED: Final = "none"
LIMITS: Final = ("requests_per_minute", "tokens_per_day", "audio_seconds_per_day", "concurrency", "weight")
"""Arguments of commands, and fields of `Terms`."""

"""Value that removes a limit."""

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Create tenants of gateways, their limits and their keys.",
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="name of the tenant")]
Models = Annotated[
    list[str] | None, typer.Option("--model", metavar="MODEL", help="a model that it may use; repeatable; default: all")
]
PerMinute = Annotated[str | None, typer.Option("--requests-per-minute", metavar="N", help="`none`: no limit")]
TokensPerDay = Annotated[str | None, typer.Option("--tokens-per-day", metavar="N", help="of a UTC day, in and out")]
AudioPerDay = Annotated[
    str | None, typer.Option("--audio-seconds-per-day", metavar="N", help="of a UTC day, heard and spoken")
]
Concurrency = Annotated[str | None, typer.Option("--concurrency", metavar="N", help="requests that run or wait")]
Weight = Annotated[
    str | None, typer.Option("--weight", metavar="N", help="share of a model for which others wait too; default 1")
]


@app.command("add")
def add_tenant(
    ctx: typer.Context,
    name: Name,
    models: Models = None,
    requests_per_minute: PerMinute = None,
    tokens_per_day: TokensPerDay = None,
    audio_seconds_per_day: AudioPerDay = None,
    concurrency: Concurrency = None,
    weight: Weight = None,
) -> None:
    """Create a tenant and its first key, which is printed once."""
    file = TenantFile(gateway_folder())
    file.add(_changed(Terms(name=name, models=tuple(models or ())), ctx.params))
    _print_key(Printer.of(ctx), name, file.new_key(name, time.time()))


@app.command("set")
def set_tenant(
    ctx: typer.Context,
    name: Name,
    models: Models = None,
    requests_per_minute: PerMinute = None,
    tokens_per_day: TokensPerDay = None,
    audio_seconds_per_day: AudioPerDay = None,
    concurrency: Concurrency = None,
    weight: Weight = None,
) -> None:
    """Change the models and limits of a tenant; gateways use them at once."""
    file = TenantFile(gateway_folder())
    terms = _stored(file, name).terms or Terms(name=name)
    if models is not None:
        terms = msgspec.structs.replace(terms, models=() if models == ["*"] else tuple(models))
    file.set_terms(_changed(terms, ctx.params))
    Printer.of(ctx).say(f"changed {name}")


@app.command("key")
def new_key(
    ctx: typer.Context,
    name: Name,
    note: Annotated[str, typer.Option("--note", metavar="TEXT", help="shown in lists")] = "",
    rotate: Annotated[
        str | None, typer.Option("--rotate", metavar="TIME", help="end its other keys after this time: 0s, 24h, 7d")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="the serve.yaml that has the tenant", exists=True)
    ] = None,
) -> None:
    """Create another key of a tenant, which is printed once."""
    is_known = file is not None and name in load_serve_file(file).tenants
    if file is not None and not is_known:
        hint = did_you_mean(name, load_serve_file(file).tenants)
        raise NotFound(f"{file} has no tenant {name!r}", hint=hint, kind="tenant", name=name)
    valid_s = None if rotate is None else parse_duration(rotate, "--rotate")
    key = TenantFile(gateway_folder()).new_key(name, time.time(), note, valid_s=valid_s, is_known=is_known)
    _print_key(Printer.of(ctx), name, key)


@app.command("revoke")
def revoke_key(
    ctx: typer.Context,
    key: Annotated[str, typer.Argument(metavar="KEY", help="its id in `tenants keys`, or the first characters")],
) -> None:
    """End a key at once."""
    tenant, record = TenantFile(gateway_folder()).revoke(key, time.time())
    Printer.of(ctx).say(f"revoked key {record.id} of {tenant}")


@app.command("rm")
def remove_tenant(ctx: typer.Context, name: Name) -> None:
    """Remove a tenant with its keys; its usage stays."""
    printer = Printer.of(ctx)
    file = TenantFile(gateway_folder())
    _stored(file, name)
    printer.confirm(f"remove tenant {name} with its keys?")
    file.remove(name)
    printer.say(f"removed {name}")


@app.command("ls")
def list_tenants(ctx: typer.Context) -> None:
    """List the tenants and their limits."""
    tenants = TenantFile(gateway_folder()).read()
    items = [_item(name, tenant) for name, tenant in sorted(tenants.items())]
    Printer.of(ctx).items("tenant", items, COLUMNS, empty="no tenants; create one with: mstarctl tenants add NAME")


@app.command("keys")
def list_keys(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="of one tenant")] = None,
) -> None:
    """List the keys of tenants by their ids; their text is not stored."""
    file = TenantFile(gateway_folder())
    tenants = file.read() if name is None else {name: _stored(file, name)}
    items = [_key_item(tenant, key) for tenant, stored in sorted(tenants.items()) for key in stored.keys]
    Printer.of(ctx).items("key", items, KEY_COLUMNS, empty="no keys")


def _stored(file: TenantFile, name: str) -> StoredTenant:
    tenants = file.read()
    if name not in tenants:
        hint = did_you_mean(name, tenants) if tenants else f"create it: mstarctl tenants add {name}"
        raise NotFound(f"no tenant {name!r}", hint=hint, kind="tenant", name=name)
    return tenants[name]


def _changed(terms: Terms, given: Mapping[str, Any]) -> Terms:
    """Return the terms with the limits among the arguments that were given. Raises UsageError."""
    values = {name: _limit(name, given[name]) for name in LIMITS if given[name] is not None}
    return msgspec.structs.replace(terms, **values)


def _limit(name: str, text: str) -> float | None:
    option = f"--{name.replace('_', '-')}"
    if text == UNLIMITED and name != "weight":
        return None
    kind = float if name in ("audio_seconds_per_day", "weight") else int
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not 0 < value < 1e15:
        what = "a number" if kind is float else "a whole number"
        raise UsageError(
            f"{option} is {text!r}", hint=f"give {what} above 0" + (", or none" if name != "weight" else "")
        )
    return value


def _print_key(printer: Printer, tenant: str, key: str) -> None:
    printer.item("key", {"name": tenant, "key": key}, key)
    printer.say(f"this key of {tenant} is not stored and not shown again; clients send it as the API key")


def _item(name: str, tenant: StoredTenant) -> dict[str, Any]:
    terms = tenant.terms or Terms(name=name)
    limits = {field: getattr(terms, field) for field in terms.__struct_fields__}
    now = time.time()
    valid = sum(key.is_valid(now) for key in tenant.keys)
    return {**limits, "name": name, "models": list(terms.models) or ["*"], "valid_keys": valid}


def _key_item(tenant: str, key: KeyRecord) -> dict[str, Any]:
    now = time.time()
    return {
        "name": key.id,
        "tenant": tenant,
        "state": "valid" if key.is_valid(now) else "revoked",
        "created_at": iso_time(key.created),
        "ends_at": None if key.revoked is None else iso_time(key.revoked),
        "note": key.note,
    }
