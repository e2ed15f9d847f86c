"""Directory of tenants: finds the tenant of a key and the models that it may use. Owned by the gate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mstar_core.errors import Refused
from mstar_core.gateway.tenants.accounts.keys import KeyRecord, hash_of, match
from mstar_core.gateway.tenants.accounts.tenant_file import TenantFile
from mstar_core.gateway.tenants.accounts.terms import ANONYMOUS, Terms

OPEN: Final = Terms(name=ANONYMOUS)


class InvalidKey(Refused):
    """The API key is missing, unknown or revoked."""

    status = 401
    code = "invalid_api_key"


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant of a request. key: id of its key, empty without one."""

    terms: Terms
    key: str = ""


class Directory:
    """Tenants of `serve.yaml` and of the tenants' file, which is read again after each change."""

    def __init__(
        self,
        file: TenantFile,
        declared: Iterable[Terms] = (),
        reserved: Mapping[str, Sequence[str]] | None = None,
        *,
        keys: Iterable[tuple[str, str]] = (),
        needs_key: bool | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """declared: of `serve.yaml`; their terms win over those of the file.

        reserved: the tenants that may use a model, for models that name some. keys: declared ones, as (tenant, text).
        needs_key: whether requests without a key are refused, None if they are as soon as there is a tenant.
        """
        self._file = file
        self._declared = {terms.name: terms for terms in declared}
        self._reserved = dict(reserved or {})
        self._declared_keys = [(tenant, KeyRecord(hash=hash_of(key))) for tenant, key in keys]
        self._needs_key = needs_key
        self._clock = clock
        self._version: tuple[int, int, int] | None = None
        self._terms: dict[str, Terms] = dict(self._declared)
        self._keys: list[tuple[str, KeyRecord]] = list(self._declared_keys)

    @property
    def tenants(self) -> Mapping[str, Terms]:
        """Return all tenants by name."""
        self._refresh()
        return self._terms

    @property
    def has_tenants(self) -> bool:
        """Whether keys of requests are those of tenants, as of the last caller: asked several times for a request."""
        if self._version is None:
            self._refresh()
        return self._is_closed() or bool(self._keys)

    def caller(self, key: str | None) -> Caller:
        """Return the tenant of a key. Raises InvalidKey for a missing, unknown or revoked one."""
        self._refresh()
        found = None if key is None else match(key, self._keys)
        if found is not None and found[1].is_valid(self._clock()):
            tenant, record = found
            return Caller(self._terms[tenant], record.id)
        if not self._is_closed() and (key is None or not self._keys):  # SDKs always send a key
            return Caller(self._terms.get(ANONYMOUS, OPEN))
        raise InvalidKey(
            "the API key is missing" if key is None else "the API key is wrong",
            hint="send it as 'Authorization: Bearer KEY'",
        )

    def visible(self, caller: Caller, models: Sequence[str]) -> Sequence[str]:
        """Return those of the models that a tenant may use."""
        terms, reserved = caller.terms, self._reserved
        return [
            model
            for model in models
            if (not terms.models or model in terms.models) and terms.name in (reserved.get(model) or (terms.name,))
        ]

    def _is_closed(self) -> bool:
        return bool(self._terms.keys() - {ANONYMOUS}) if self._needs_key is None else self._needs_key

    def _refresh(self) -> None:
        version = self._file.version()
        if version == self._version:
            return
        stored = self._file.read()
        self._version = version
        self._terms = {name: tenant.terms for name, tenant in stored.items() if tenant.terms is not None}
        self._terms |= self._declared
        self._keys = [(name, key) for name, tenant in stored.items() if name in self._terms for key in tenant.keys]
        self._keys += self._declared_keys
