"""`mstarctl call`: sends one request and writes its answer to a file, or one per tick as a control loop does."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.errors import ExitCode, MstarError, NotFound, UsageError
from mstar_core.host.run_dir import RunDirectory
from mstarctl.call.ask import Ask, Card, parse_params, read_files, requested_outputs, state_param
from mstarctl.call.flags import flags_named
from mstarctl.call.notice import warn_once
from mstarctl.call.pace import keep_pace
from mstarctl.call.player import Player, required_player
from mstarctl.call.report import Progress, Tally, report, report_pace
from mstarctl.call.samples import chosen, sampled, sampled_output
from mstarctl.call.sink import Sink, chosen_output
from mstarctl.call.starting import check_started
from mstarctl.client.api import ApiClient
from mstarctl.client.endpoints import endpoint_of, name_here, spec_of, url_of
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
    api_key: Annotated[
        str | None, typer.Option("--api-key", help=f"API key for a deployment of another host; also {KEY_VARIABLE}")
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
    with served(printer.options, target, api_key, printer, is_waiting=is_waiting) as server, flags_named(server.card):
        card = server.card
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
    """The connected api of one deployment. Valid inside the `served` block. address: of its realtime route."""

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
) -> Iterator[Server]:
    """Find a deployment by its name or its model's name, here or on another host, and read its model card.

    is_waiting: wait for one of this host that is starting. Raises Unavailable without it. url: of any server with the
    OpenAI routes, in place of a deployment. Raises UsageError if both are given.
    """
    key = api_key or os.environ.get(KEY_VARIABLE)
    if url is not None:
        if target is not None:
            raise UsageError("name a deployment or --url, one of them", hint="--model chooses a model of the server")
        parts = url_of(url)
        address = RealtimeAddress(url=parts.geturl().rstrip("/").removesuffix("/v1"), key=key)
        with ApiClient(address.url, api_key=key) as client:
            card = _card(client)
            yield Server(name=card.name, client=client, address=address, card=card, facts={"url": parts.geturl()})
        return
    name = None if target is None else target.partition(":")[0]
    with reached(options, name_here(options, name)) as reached_target:
        if reached_target.run is not None:
            check_started(reached_target.run, printer, is_waiting=is_waiting)
            spec = spec_of(reached_target.run)
            facts: dict[str, Any] = {"deployment": spec.name, "model": spec.model, "weights": spec.weights_source}
            own_key = key or next(iter(spec.api.api_keys), None)
            address = RealtimeAddress(url=endpoint_of(spec), key=own_key, tls=tls_context(spec))
            with ApiClient(address.url, api_key=own_key, transport=tls_transport(address.tls)) as client:
                card, run = _card(client), reached_target.run
                yield Server(name=spec.name, client=client, address=address, card=card, facts=facts, run=run)
            return
        with _forwarded_api(reached_target, key) as (client, address):
            head = reached_target.admin.head()
            facts = {"deployment": reached_target.name, "model": head.get("model"), "weights": head.get("weights")}
            name, card = reached_target.name, _card(client)
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


def _card(client: ApiClient) -> Card:
    models = client.models()
    if not models:
        raise NotFound(f"{client.base_url} serves no model", hint="see its log", kind="model", name="")
    return Card.of(models[0])


def tls_context(spec: DeploymentSpec) -> ssl.SSLContext | None:
    """Return the TLS settings for a deployment of this host. Its certificate is trusted, whatever its host name."""
    if spec.api.tls_cert is None:
        return None
    import ssl

    context = ssl.create_default_context(cafile=spec.api.tls_cert)
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
