"""The list `api.realtime_ice_servers` of a file: URLs and users of STUN and TURN servers. Called by `resolve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mstar_core.config.files.faults import Faults
from mstar_core.config.files.read import CheckedValue
from mstar_core.config.ice import TURN, ice_scheme
from mstar_core.config.resolved import IceServer

KEY: Final = "api.realtime_ice_servers"
USER_FIELDS: Final = ("username", "credential_file", "secret_file")
URLS: Final = "stun:HOST:PORT, turn:HOST:PORT, turn:HOST:PORT?transport=tcp or turns:HOST:PORT"


def ice_servers(values: Mapping[str, CheckedValue], faults: Faults) -> tuple[IceServer, ...]:
    """Return the servers of a file. Collects the faults of each."""
    listed = values.get(KEY)
    if listed is None or listed.value is None or faults.spoil(KEY):
        return ()
    servers: list[IceServer] = []
    for index in range(listed.value):
        with faults.collected():
            servers.append(_server(values, f"{KEY}.{index}"))
    return tuple(servers)


def _server(values: Mapping[str, CheckedValue], key: str) -> IceServer:
    urls = values[f"{key}.urls"]
    schemes = [ice_scheme(url) for url in urls.value]
    for index, scheme in enumerate(schemes):
        if scheme is None:
            name = f"{key}.urls.{index}"
            raise urls.place.value[index].error(f"{name} is {urls.value[index]!r}", name, hint=URLS)
    set_fields = {name: values[f"{key}.{name}"] for name in USER_FIELDS if f"{key}.{name}" in values}
    given = {name: value for name, value in set_fields.items() if value.value is not None}
    if any(scheme in TURN for scheme in schemes):
        _check_user(urls, given, key)
    elif given:
        name, value = next(iter(given.items()))
        raise value.place.error(
            f"{key}.{name} has no effect", f"{key}.{name}", "STUN servers have no users", f"remove {name}"
        )
    return IceServer(urls=urls.value, **{name: value.value for name, value in given.items()})


def _check_user(urls: CheckedValue, given: Mapping[str, CheckedValue], key: str) -> None:
    """Raise ConfigError unless a TURN server has a user with a password, or a secret from which passwords follow."""
    if "credential_file" in given and "secret_file" in given:
        raise given["secret_file"].place.error(
            "credential_file and secret_file exclude each other",
            f"{key}.secret_file",
            hint="secret_file makes credentials that expire; keep one of them",
        )
    if "secret_file" in given or ("credential_file" in given and "username" in given):
        return
    missing = "username" if "credential_file" in given else "credential_file"
    raise urls.place.error(
        f"{key} is a TURN server without {missing}",
        f"{key}.{missing}",
        hint="add username and credential_file, or secret_file",
    )
