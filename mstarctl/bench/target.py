"""Server under test: a deployment found by its admin socket, a model of a gateway, or any URL."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from mstar_core.errors import MstarError, NotFound, Unreachable, UsageError, did_you_mean
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
    """A server under test. model: name of the model for its plugin. admin: None for a URL or behind a gateway.

    is_adapter: the card is that of a LoRA adapter, which requests to /generate cannot choose.
    """

    name: str
    model: str
    url: str
    server: ServerAddress
    card: ServedModel
    admin: AdminClient | None = None
    config: dict[str, Any] | None = None
    is_adapter: bool = False


@contextmanager
def target_of(
    options: GlobalOptions,
    name: str | None,
    url: str | None,
    api_key: str | None,
    ready_s: float,
    model: str | None = None,
) -> Iterator[BenchTarget]:
    """Find the server and wait until it is ready. Raises UsageError, NotFound, Unreachable.

    name: of a deployment, its model, or a gateway; with `url`, of a model of that server. model: one of a gateway.
    """
    if name is None and url is None:
        raise UsageError("name a deployment or --url", hint="mstarctl bench run orpheus --workload tts-short")
    key = api_key or os.environ.get(KEY_VARIABLE)
    if url is not None:
        if name is not None and model is not None:
            raise UsageError("with --url, MODEL and --model exclude each other", hint="omit one of them")
        yield _of_url(url, key, ready_s, model or name)
        return
    from mstarctl.client.admin import AdminClient
    from mstarctl.client.endpoints import endpoint_of, gateway_for, name_here, spec_of
    from mstarctl.client.reach import reached

    name = str(name).partition(":")[0]
    if (found := gateway_for(options, name, model)) is not None:
        run, model = found
        with AdminClient.of(run) as admin:
            endpoint = str(admin.head()["endpoint"])
        yield _of_url(endpoint, key, ready_s, model)
        return
    with reached(options, name_here(options, name)) as target:
        if target.run is not None:
            spec = spec_of(target.run)
            key = key or next(iter(spec.api.api_keys), None)
            served = _of_url(endpoint_of(spec), key, ready_s, model)
        else:
            served = _of_url(str(target.admin.head()["endpoint"]), key, ready_s, model)
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
            is_adapter=served.is_adapter,
        )


def _of_url(url: str, key: str | None, ready_s: float, model: str | None = None) -> BenchTarget:
    """Return the server at a URL, or one model of the gateway there. model: by default the only or the first one."""
    from mstarctl.client.endpoints import url_of
    from mstarctl.client.gateways import chosen_card, is_gateway_list, model_of, model_url

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
    cards = _cards(server, ready_s)
    if is_gateway_list(cards):
        chosen = chosen_card(cards, model, parts.netloc, parts.geturl())
        name = model_of(chosen)
        adapter = str(chosen["id"]) if "parent" in chosen else None
        return replace(_of_url(model_url(parts.geturl(), name), key, ready_s, adapter), name=str(chosen["id"]))
    card = _named(cards, model, parts.netloc)
    return BenchTarget(
        name=card.name or parts.netloc,
        model=card.name or parts.netloc,
        url=parts.geturl(),
        server=server,
        card=card,
        is_adapter=any(each["id"] == card.name and each.get("parent") for each in cards),
    )


def _named(cards: list[dict[str, Any]], name: str | None, where: str) -> ServedModel:
    """Return the card of a model or adapter by its name, by default of the first; empty for a server without models."""
    models = [ServedModel.of(card) for card in cards]
    if name is None:
        return models[0] if models else ServedModel(name="")
    found = next((card for card in models if name == card.name or name in card.aliases), None)
    if found is None:
        hint = did_you_mean(name, [card.name for card in models])
        raise NotFound(f"{where} serves no model {name!r}", hint=hint, kind="model", name=name)
    return found


def _cards(server: ServerAddress, ready_s: float) -> list[dict[str, Any]]:
    """Wait until the server is ready and return its /v1/models; empty for a server without this route."""
    end = time.monotonic() + ready_s
    while True:
        try:
            status, body = get(server, "/v1/models")
        except OSError as error:
            status, body = 0, str(error).encode()
        if status == 200 and is_ready(server):
            cards: list[dict[str, Any]] = json.loads(body)["data"]
            return cards
        if status in (404, 405):
            return []
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
