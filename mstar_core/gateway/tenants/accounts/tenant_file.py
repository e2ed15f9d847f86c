"""File of tenants and their keys in the gateway's state folder. Written by `mstarctl tenants`, read by gateways."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from mstar_core.config.name import check_name
from mstar_core.errors import ConfigError, NotFound, StateConflict, did_you_mean
from mstar_core.gateway.tenants.accounts.folder import made
from mstar_core.gateway.tenants.accounts.keys import KeyRecord, hash_of, new_key
from mstar_core.gateway.tenants.accounts.terms import Terms
from mstar_core.host.private_files import write_private

FILE: Final = "tenants.json"


class StoredTenant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tenant with its keys. terms: None if only `serve.yaml` has them."""

    keys: tuple[KeyRecord, ...] = ()
    terms: Terms | None = None


class TenantFile:
    """Tenants of the file `tenants.json`, mode 0600. Every change is a whole new file, under a lock."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def read(self) -> dict[str, StoredTenant]:
        """Return the tenants by name, none without a file. Raises ConfigError if it is damaged."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read", str(error), "check the owner of the file") from error
        try:
            return msgspec.json.decode(data, type=dict[str, StoredTenant])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            hint = "restore the file, or move it away and create the tenants again"
            raise ConfigError(f"{self.path} is damaged", str(error), hint, file=str(self.path)) from error

    def version(self) -> tuple[int, int, int] | None:
        """Return a value that changes with each write, None without a file."""
        try:
            facts = os.stat(self.path)
        except FileNotFoundError:
            return None
        return facts.st_ino, facts.st_mtime_ns, facts.st_size

    def add(self, terms: Terms) -> None:
        """Add a tenant without keys, or set the terms of one that has keys only. Raises StateConflict, ConfigError."""
        check_name(terms.name)
        with self._changed() as tenants:
            stored = tenants.get(terms.name, StoredTenant())
            if stored.terms is not None:
                hint = f"change it: mstarctl tenants set {terms.name}"
                raise StateConflict(f"tenant {terms.name!r} exists", hint=hint)
            tenants[terms.name] = msgspec.structs.replace(stored, terms=terms)

    def set_terms(self, terms: Terms) -> None:
        """Replace the terms of a tenant. Raises NotFound."""
        with self._changed() as tenants:
            stored = _of(tenants, terms.name)
            tenants[terms.name] = msgspec.structs.replace(stored, terms=terms)

    def remove(self, name: str) -> None:
        """Remove a tenant with its keys. Raises NotFound."""
        with self._changed() as tenants:
            _of(tenants, name)
            del tenants[name]

    def new_key(
        self, name: str, now: float, note: str = "", *, valid_s: float | None = None, is_known: bool = False
    ) -> str:
        """Create a key of a tenant and return its text. Raises NotFound.

        valid_s: seconds for which its other keys stay valid, None to leave them. is_known: `serve.yaml` has the tenant.
        """
        key = new_key()
        with self._changed() as tenants:
            stored = tenants.get(name, StoredTenant()) if is_known else _of(tenants, name)
            kept = stored.keys
            if valid_s is not None:
                kept = tuple(_ended(record, now + valid_s) for record in kept)
            record = KeyRecord(hash=hash_of(key), created=now, note=note)
            tenants[name] = msgspec.structs.replace(stored, keys=(*kept, record))
        return key

    def revoke(self, key_id: str, now: float) -> tuple[str, KeyRecord]:
        """Revoke a key by the first characters of its id. Returns its tenant and record. Raises NotFound."""
        with self._changed() as tenants:
            known = [(name, record) for name, stored in tenants.items() for record in stored.keys]
            found = [(name, record) for name, record in known if record.id.startswith(key_id)]
            if len(found) != 1 or not key_id:
                hint = did_you_mean(key_id, [record.id for _, record in known]) if not found else "give more characters"
                title = f"no key {key_id!r}" if not found else f"{len(found)} keys begin with {key_id!r}"
                raise NotFound(title, hint=hint, kind="key", name=key_id)
            name, record = found[0]
            ended = _ended(record, now)
            stored = tenants[name]
            keys = tuple(ended if each is record else each for each in stored.keys)
            tenants[name] = msgspec.structs.replace(stored, keys=keys)
            return name, ended

    @contextmanager
    def _changed(self) -> Iterator[dict[str, StoredTenant]]:
        """Let a block change the tenants; they are written at its end, and not if it raises."""
        made(self.path.parent)
        fd = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            tenants = self.read()
            yield tenants
            write_private(self.path, msgspec.json.format(msgspec.json.encode(tenants), indent=1))
        finally:
            os.close(fd)


def _of(tenants: dict[str, StoredTenant], name: str) -> StoredTenant:
    if name not in tenants:
        hint = did_you_mean(name, tenants) if tenants else f"create it: mstarctl tenants add {name}"
        raise NotFound(f"no tenant {name!r}", hint=hint, kind="tenant", name=name)
    return tenants[name]


def _ended(record: KeyRecord, at: float) -> KeyRecord:
    """Return a record that ends at `at`, or earlier if it ends already."""
    return msgspec.structs.replace(record, revoked=at if record.revoked is None else min(at, record.revoked))
