"""`mstarctl call`: sends one request and writes its answer to a file, or one per tick as a control loop does."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from mstar_core.errors import ExitCode, MstarError, NotFound, UsageError
from mstar_core.host.run_dir import RunDirectory
from mstarctl.call.ask import Ask, Card, named_model, parse_params, read_files, requested_outputs, state_param
from mstarctl.call.flags import flags_named
from mstarctl.call.notice import warn_once
from mstarctl.call.pace import keep_pace
from mstarctl.call.player import Player, required_player
from mstarctl.call.report import Progress, Tally, report, report_pace
from mstarctl.call.samples import chosen, sampled, sampled_output
from mstarctl.call.sink import Sink, chosen_output
from mstarctl.call.starting import check_started
from mstarctl.client.admin import AdminClient
from mstarctl.client.api import ApiClient
from mstarctl.client.endpoints import endpoint_of, gateway_for, name_here, spec_of, url_of
from mstarctl.client.gateways import chosen_card, is_awake, is_gateway_list, model_of, model_url
from mstarctl.client.reach import Reached, reached
from mstarctl.client.realtime import RealtimeAddress
from mstarctl.client.tunnel import forwarded
from mstarctl.complete import ServedName, voice_names
from mstarctl.output import GlobalOptions, Printer
from mstarctl.output.units import counted

if TYPE_CHECKING:
    import ssl

    import httpx

KEY_VARIABLE: Final = "MSTAR_API_KEY"
TICKS: Final = 100
LOAD_S: Final = 900.0
"""Longest silence of a gateway that loads or wakes a model."""


def call(
    ctx: typer.Context,
    target: ServedName = None,
    text: Annotated[str | None, typer.Option("--text", help="the prompt; - reads it from stdin")] = None,
    voice: Annotated[
        str | None, typer.Option("--voice", help="speaker, for models that have them", autocompletion=voice_names)
    ] = None,
    image: Annotated[list[Path] | None, typer.Option("--image", metavar="FILE", help="an image; repeatable")] = None,
    audio: Annotated[list[Path] | None, typer.Option("--audio", metavar="FILE", help="a sound; repeatable")] = None,
    video: Annotated[list[Path] | None, typer.Option("--video", metavar="FILE", help="a video; repeatable")] = None,
    state: Annotated[
        Path | None, typer.Option("--state", metavar="FILE", help="the state of a robot: numbers, JSON or .npy")
    ] = None,
    params: Annotated[
        list[str] | None, typer.Option("--param", metavar="KEY=VALUE", help="a parameter of the model; repeatable")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="FILE", help="file of the answer; its ending selects the output; - is stdout"),
    ] = None,
    is_played: Annotated[
        bool, typer.Option("--play", help="also play sound as it arrives, by ffplay, aplay or afplay")
    ] = False,
    request_id: Annotated[str | None, typer.Option("--request-id", metavar="ID", help="id of the request")] = None,
    is_streamed: Annotated[
        bool, typer.Option("--stream/--no-stream", help="write the answer as it arrives, or when it is complete")
    ] = True,
    is_sample: Annotated[
        bool, typer.Option("--sample", help="send inputs that fit the model; other options replace parts of them")
    ] = False,
    sample_name: Annotated[
        str | None, typer.Option("--sample-name", metavar="NAME", help="the same with another sample of the model")
    ] = None,
    is_waiting: Annotated[bool, typer.Option("--wait", help="wait until a starting deployment is ready")] = False,
    rate: Annotated[
        float | None,
        typer.Option("--rate", metavar="HZ", min=0.01, max=10_000, help="send at this rate and count missed deadlines"),
    ] = None,
    ticks: Annotated[int, typer.Option("--ticks", min=1, help="with --rate: number of requests")] = TICKS,
    max_misses: Annotated[
        int | None, typer.Option("--max-misses", min=0, help="with --rate: exit 8 if more deadlines are missed")
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="address of a deployment or gateway; NAME is then a model of it")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="a model of a gateway; optional if it has only one")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", help=f"API key for a gateway or a deployment of another host; also {KEY_VARIABLE}"),
    ] = None,
) -> None:
    """Send one request and write the answer to a file."""
    printer = Printer.of(ctx)
    if rate is None and max_misses is not None:
        raise UsageError("--max-misses needs --rate", hint="add --rate HZ")
    if rate is not None and request_id is not None:
        raise UsageError("--rate sends many requests, and --request-id names one", hint="omit one of them")
    player = Player(required_player()) if is_played else None
    if is_played and rate is not None:
        raise UsageError("--play and --rate exclude each other", hint="omit one of them")
    words = sys.stdin.read() if text == "-" else text
    with (
        served(printer.options, target, api_key, printer, is_waiting=is_waiting, url=url, model=model) as server,
        flags_named(server.card),
    ):
        card = server.card
        if card.parent:
            raise UsageError(
                f"{card.name} is an adapter of {card.parent}, which /generate does not choose",
                hint=f"mstarctl chat {server.name} --model {card.name}",
            )
        sample = None
        if is_sample or sample_name is not None:
            sample = chosen(server.name, server.client.samples(), sample_name)
        media = {"image": image, "audio": audio, "video": video}
        # Kinds keep their order on the command line, because models tell inputs (frames and goal) apart by it.
        ordered = [kind for kind in ctx.params if kind in media]
        files = tuple(file for kind in ordered for file in read_files(card, kind, media[kind]))
        values = {**parse_params(params or []), **({} if voice is None else {"voice": voice})}
        values |= {} if state is None else state_param(card, state)
        if sample is not None:
            kind = sampled_output(sample, card.name, out)
            ask = sampled(sample, text=words, files=files, params=values, request_id=request_id)
        else:
            if words is None and not files:
                raise UsageError("the request has no input", hint='--text "Hello there", or --sample')
            kind = chosen_output(card.name, card.outputs, out)
            ask = Ask(
                outputs=requested_outputs(card, kind), text=words, files=files, params=values, request_id=request_id
            )
        warn_once(card.notice, server.run, printer)
        if server.is_tunnelled:
            printer.warn("the answer comes through ssh, so the times include the connection")
        if rate is None:
            if player is not None and kind != "audio":
                raise UsageError(f"{server.name} answers with {kind}", hint="omit --play")
            call_once(server, ask, Sink.of(kind, out, server.name), printer, is_streamed=is_streamed, player=player)
        else:
            call_at(server, ask, kind, out, printer, rate=rate, ticks=ticks, max_misses=max_misses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The connected api of one deployment, or of one model of a gateway. Valid inside the `served` block.

    address: of its realtime route. card: of the chosen model.
    """

    name: str
    client: ApiClient
    address: RealtimeAddress
    card: Card
    facts: dict[str, Any]
    is_tunnelled: bool = False
    run: RunDirectory | None = None


@contextmanager
def served(
    options: GlobalOptions,
    target: str | None,
    api_key: str | None,
    printer: Printer,
    *,
    is_waiting: bool = False,
    url: str | None = None,
    model: str | None = None,
) -> Iterator[Server]:
    """Find a deployment by its name or its model's name, here, on another host or behind a gateway; read its card.

    is_waiting: wait for one of this host that is starting. Raises Unavailable without it. url: of any server with the
    OpenAI routes, in place of a deployment; `target` is then a model of it. model: a model of a gateway, or a model or
    adapter of another server; by default its only or its first one. Raises UsageError if the choice is not clear.
    """
    key = api_key or os.environ.get(KEY_VARIABLE)
    facts: dict[str, Any]
    if url is not None:
        if target is not None and model is not None:
            raise UsageError("with --url, NAME and --model exclude each other", hint="omit one of them")
        parts = url_of(url)
        address = RealtimeAddress(url=parts.geturl().rstrip("/").removesuffix("/v1"), key=key)
        with _at(address, model or target, parts.netloc, printer, {"url": parts.geturl()}) as server:
            yield server
        return
    name = None if target is None else target.partition(":")[0]
    if (found := gateway_for(options, name, model)) is not None:
        run, model = found
        facts = {"gateway": run.name}
        with _at(_address_of(run, key), model, f"gateway {run.name!r}", printer, facts) as server:
            yield server
        return
    with reached(options, name_here(options, name)) as reached_target:
        if reached_target.run is not None:
            check_started(reached_target.run, printer, is_waiting=is_waiting)
            spec = spec_of(reached_target.run)
            facts = {"deployment": spec.name, "model": spec.model, "weights": spec.weights_source}
            own_key = key or next(iter(spec.api.api_keys), None)
            address = RealtimeAddress(url=endpoint_of(spec), key=own_key, tls=tls_context(spec.api.tls_cert))
            with ApiClient(address.url, api_key=own_key, transport=tls_transport(address.tls)) as client:
                card, own_run = _card(client, model), reached_target.run
                yield Server(name=spec.name, client=client, address=address, card=card, facts=facts, run=own_run)
            return
        with _forwarded_api(reached_target, key) as (client, address):
            head = reached_target.admin.head()
            facts = {"deployment": reached_target.name, "model": head.get("model"), "weights": head.get("weights")}
            name, card = reached_target.name, _card(client, model)
            yield Server(name=name, client=client, address=address, card=card, facts=facts, is_tunnelled=True)


@contextmanager
def _forwarded_api(target: Reached, key: str | None) -> Iterator[tuple[ApiClient, RealtimeAddress]]:
    head = target.admin.head()
    if target.context is None or target.context.is_local:  # --socket on this host
        with ApiClient(str(head["endpoint"]), api_key=key) as client:
            yield client, RealtimeAddress(url=str(head["endpoint"]), key=key)
        return
    import httpx

    with forwarded(target.context, urlsplit(str(head["endpoint"])).netloc) as local:
        with ApiClient(
            "http://localhost", api_key=key, transport=httpx.HTTPTransport(uds=str(local), verify=False)
        ) as client:
            yield client, RealtimeAddress(url="http://localhost", key=key, socket=local)


def _address_of(run: RunDirectory, key: str | None) -> RealtimeAddress:
    """Return the address of a running gateway of this host."""
    with AdminClient.of(run) as admin:
        endpoint = str(admin.head()["endpoint"])
        return RealtimeAddress(url=endpoint, key=key, tls=tls_context(admin.get("/v1/config")["serve"].get("tls_cert")))


@contextmanager
def _at(
    address: RealtimeAddress, model: str | None, where: str, printer: Printer, facts: dict[str, Any]
) -> Iterator[Server]:
    """Connect to a server, or through a gateway to one of its models, whose routes are below /m/MODEL.

    where: the server in errors. facts: in the report of a request.
    """
    with ApiClient(address.url, api_key=address.key, transport=tls_transport(address.tls)) as client:
        cards = client.models()
        if not is_gateway_list(cards):
            card = _card(client, model, cards)
            yield Server(
                name=card.name, client=client, address=address, card=card, facts={"deployment": card.name, **facts}
            )
            return
    chosen = chosen_card(cards, model, where, address.url)
    name = model_of(chosen)
    if not is_awake(chosen):
        printer.say(f"{name} is {chosen['state']}: {where} makes it ready first")
    address = replace(address, url=model_url(address.url, name))
    with ApiClient(address.url, api_key=address.key, transport=tls_transport(address.tls), silence_s=LOAD_S) as client:
        card = _card(client, str(chosen["id"]) if "parent" in chosen else None)
        yield Server(
            name=name, client=client, address=address, card=card, facts={"deployment": name, "model": name, **facts}
        )


def _card(client: ApiClient, name: str | None = None, models: list[dict[str, Any]] | None = None) -> Card:
    """Return the card of a model or adapter by its name, by default of the first. models: of the server, if known."""
    models = client.models() if models is None else models
    if not models:
        raise NotFound(f"{client.base_url} serves no model", hint="see its log", kind="model", name="")
    return Card.of(models[0]) if name is None else named_model(tuple(map(Card.of, models)), name)


def tls_context(certificate: str | None) -> ssl.SSLContext | None:
    """Return the TLS settings for a server of this host. Its certificate is trusted, whatever its host name."""
    if certificate is None:
        return None
    import ssl

    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False  # the connection uses an address; the certificate's key proves the identity
    return context


def tls_transport(context: ssl.SSLContext | None) -> httpx.BaseTransport | None:
    """Return the transport to a TLS deployment, None for the default one."""
    if context is None:
        return None
    import httpx

    return httpx.HTTPTransport(verify=context)


def call_once(
    server: Server, ask: Ask, sink: Sink, printer: Printer, *, is_streamed: bool, player: Player | None = None
) -> None:
    """Send one request and write its answer as it arrives. player: plays its sound too."""
    tally = Tally(started=time.monotonic(), kind=sink.kind)
    progress = Progress(printer, is_streamed=is_streamed)
    lines = ask.send(server.client)
    try:
        for line in lines if is_streamed else list(lines):
            tally.add(line)
            sink.add(line)
            if player is not None and line.modality == "audio":
                facts = line.metadata
                player.write(line.data, int(facts.get("sample_rate", 24000)), int(facts.get("num_channels", 1)))
            progress.show(tally, sink)
        sink.begin()
        if player is not None:
            player.close()
    finally:
        progress.end()
        if player is not None:
            player.stop()
        sink.close()
        if not tally.is_done and tally.chunks and sink.path is not None:
            printer.warn(f"{sink.path} contains a partial answer: {sink.amount}")
    is_read_aloud = server.card.speech == "verbatim"
    report(tally, sink, server.facts, printer, spoken=(ask.text or "") if is_read_aloud else "")


def call_at(
    server: Server,
    ask: Ask,
    kind: str,
    out: str | None,
    printer: Printer,
    *,
    rate: float,
    ticks: int,
    max_misses: int | None,
) -> None:
    """Send one request per tick; --out keeps the last answer. Raises MstarError if too many deadlines were missed."""
    last: list[Any] = []

    def send(skipped: int) -> None:
        last[:] = list(ask.send(server.client, period_ms=1000 / rate, skipped_ticks=skipped))

    progress = Progress(printer, is_streamed=True)
    try:
        paced = keep_pace(rate, ticks, send, show=progress.show_paced)
    finally:
        progress.end()
    if out is not None:
        sink = Sink.of(kind, out, server.name)
        for line in last:
            sink.add(line)
        sink.close()
        printer.say(f"wrote the last answer: {', '.join(map(str, sink.files)) or 'stdout'}")
    report_pace(paced, server.facts, printer)
    if max_misses is not None and paced.missed > max_misses:
        raise too_many(paced.missed, paced.ticks, max_misses)


def too_many(missed: int, ticks: int, allowed: int) -> MstarError:
    """Return the error of a control loop that missed too many deadlines."""
    error = MstarError(
        f"{missed} of {counted(ticks, 'deadline')} {'was' if missed == 1 else 'were'} missed",
        f"the limit is {allowed}",
        "lower --rate",
        code="deadlines_missed",
    )
    error.exit_code = ExitCode.ASSERTION
    return error
