"""Server under test: a deployment found by its admin socket, or any URL."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mstar_core.errors import MstarError, Unreachable, UsageError
from mstar_core.workloads import ServedModel
from mstarctl.bench.client.wire import ServerAddress

if TYPE_CHECKING:
    from mstar_core.plugin.offers import WorkloadSpec
    from mstarctl.client.admin import AdminClient
    from mstarctl.output import GlobalOptions

KEY_VARIABLE: Final = "MSTAR_API_KEY"
POLL_S: Final = 0.25
ANSWER_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTarget:
    """A server under test. model: name of the model for its plugin. admin: None for a URL."""

    name: str
    model: str
    url: str
    server: ServerAddress
    card: ServedModel
    admin: AdminClient | None = None
    config: dict[str, Any] | None = None


@contextmanager
def target_of(
    options: GlobalOptions, model: str | None, url: str | None, api_key: str | None, ready_s: float
) -> Iterator[BenchTarget]:
    """Find the server and wait until it is ready. Raises UsageError, NotFound, Unreachable."""
    if (model is None) == (url is None):
        raise UsageError(
            "name a deployment or --url, one of them", hint="mstarctl bench run orpheus --workload tts-short"
        )
    if url is not None:
        key = api_key or os.environ.get(KEY_VARIABLE)
        yield _of_url(url, key, ready_s)
        return
    from mstarctl.client.endpoints import endpoint_of, name_here, spec_of
    from mstarctl.client.reach import reached

    with reached(options, name_here(options, None if model is None else model.partition(":")[0])) as target:
        key = api_key or os.environ.get(KEY_VARIABLE)
        if target.run is not None:
            spec = spec_of(target.run)
            key = key or next(iter(spec.api.api_keys), None)
            served = _of_url(endpoint_of(spec), key, ready_s)
        else:
            served = _of_url(str(target.admin.head()["endpoint"]), key, ready_s)
        head = target.admin.head()
        config = {"weights": head.get("weights"), "boot": head.get("boot"), "state": head.get("state")}
        yield BenchTarget(
            name=target.name,
            model=str(head.get("model") or served.model),
            url=served.url,
            server=served.server,
            card=served.card,
            admin=target.admin,
            config=config,
        )


def _of_url(url: str, key: str | None, ready_s: float) -> BenchTarget:
    from mstarctl.client.endpoints import url_of

    parts = url_of(url)
    is_tls = parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    try:
        # Resolved once, so that no request waits for a resolver.
        address = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise Unreachable(f"{parts.hostname} cannot be resolved", str(error), "check --url") from error
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    server = ServerAddress(
        address=str(address),
        port=port,
        host=parts.netloc,
        is_tls=is_tls,
        prefix=parts.path.rstrip("/"),
        headers=headers,
        is_verified=parts.hostname not in ("127.0.0.1", "localhost", "::1"),
    )
    card = _card(server, ready_s)
    return BenchTarget(
        name=card.name or parts.netloc, model=card.name or parts.netloc, url=parts.geturl(), server=server, card=card
    )


def _card(server: ServerAddress, ready_s: float) -> ServedModel:
    """Wait until the server is ready and read its first model. A server without models gets an empty card."""
    end = time.monotonic() + ready_s
    while True:
        try:
            status, body = get(server, "/v1/models")
        except OSError as error:
            status, body = 0, str(error).encode()
        if status == 200 and is_ready(server):
            return ServedModel.of(json.loads(body)["data"][0])
        if status in (404, 405):
            return ServedModel(name="")
        if status in (401, 403):
            raise Unreachable(f"{server.host} refuses the key", f"status {status}", f"--api-key, or {KEY_VARIABLE}")
        if time.monotonic() >= end:
            why = body[:200].decode("utf-8", "replace") if status != 200 else "it does not report that it is ready"
            raise Unreachable(
                f"{server.host} is not ready", f"{why} ({ready_s:g} s)", "mstarctl ps, or --ready-timeout"
            )
        time.sleep(min(POLL_S, max(0.0, end - time.monotonic())))


def is_ready(server: ServerAddress) -> bool:
    """Return whether the server accepts requests. Servers without `/ready` count as ready."""
    try:
        status, _ = get(server, "/ready")
    except OSError:
        return False
    return status != 503


def get(server: ServerAddress, path: str, timeout_s: float = ANSWER_S) -> tuple[int, bytes]:
    """Read one path outside the load. Raises OSError."""
    import http.client
    import ssl

    context = ssl.create_default_context() if server.is_tls else None
    if context is not None and not server.is_verified:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = (
        http.client.HTTPSConnection(server.address, server.port, timeout=timeout_s, context=context)
        if server.is_tls
        else http.client.HTTPConnection(server.address, server.port, timeout=timeout_s)
    )
    try:
        connection.request("GET", f"{server.prefix}{path}", headers={"Host": server.host, **server.headers})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()


def offered_workloads(card: ServedModel, model: str) -> list[WorkloadSpec]:
    """Return the workloads of a model's plugin, or the generic ones if no installed plugin serves it."""
    from mstarctl.bench.load.workloads import GENERIC
    from mstarctl.plugins import Plugins

    plugins = Plugins.discover()
    for name in filter(None, (model, card.name, *card.aliases)):
        try:
            workloads = plugins.workloads(plugins.model(name))
        except MstarError:
            continue
        if workloads:
            return list(workloads)
    return list(GENERIC)
