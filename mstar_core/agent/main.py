"""Main of the agent process: opens its mailbox, waits for the supervisor's welcome, runs the agent."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import time
from typing import Final

import msgspec
import zmq

from mstar_core.agent.agent import Agent
from mstar_core.agent.daemon import Report, detach, print_line, redirect
from mstar_core.agent.run_dir import agent_directory, take_directory
from mstar_core.cluster.placer import AgentOrder, StartedAgent
from mstar_core.config.deployment import DeploymentSpec
from mstar_core.errors import ExitCode, MstarError, StartError
from mstar_core.messages.hosts import Welcome
from mstar_core.messages.life import Stop
from mstar_core.messages.names import agent_name
from mstar_core.messages.wire import WIRE_VERSION, Envelope, WireCodec
from mstar_core.process.life import ChildLife
from mstar_core.process.logs import start_logging
from mstar_core.process.system import raise_descriptor_limit
from mstar_core.transport import KEYS_FILE, Courier, CurveKeys, Mailbox, Malformed, RemoteAccess, make_keys, write_keys
from mstar_core.version import __version__

WELCOME_S: Final = 60.0
"""Time for the supervisor to connect, after which the agent ends."""

LINGER_S: Final = 1.0
LOG_FILE: Final = "agent.log"

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> None:
    """Run `python -m mstar_core.agent [--detach] [ORDER_JSON]` and exit with its code. The order may be on stdin."""
    parser = argparse.ArgumentParser(prog="mstar_core.agent")
    parser.add_argument("order", nargs="?", help="AgentOrder as JSON; standard input if missing")
    parser.add_argument("--detach", action="store_true", help="go on as a daemon once the mailbox is open")
    args = parser.parse_args(argv)
    try:
        order = msgspec.json.decode(args.order or sys.stdin.read(), type=AgentOrder)
    except msgspec.DecodeError as error:
        parser.error(f"the order cannot be read: {error}")
    number_gpus()
    report = detach() if args.detach else print_line
    try:
        code = _serve(order, report, is_daemon=args.detach)
    except (MstarError, OSError) as error:
        print(error, file=sys.stderr)
        code = error.exit_code if isinstance(error, MstarError) else ExitCode.START_FAILED
    sys.exit(int(code))


def number_gpus() -> None:
    """Have children number the GPUs as NVML does, whatever the program that started the agent was restricted to."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"


def started(order: AgentOrder, endpoint: str, key: str) -> StartedAgent:
    """Return the record of this agent."""
    return StartedAgent(
        host=order.host,
        address=order.address,
        endpoint=endpoint,
        key=key,
        pid=os.getpid(),
        incarnation=order.incarnation,
        title=socket.gethostname(),
        versions={"mstarctl": __version__, "wire": str(WIRE_VERSION)},
    )


def _serve(order: AgentOrder, report: Report, *, is_daemon: bool) -> ExitCode:
    keys, codec = make_keys(), WireCodec(agent_name(order.host), order.incarnation)
    access = RemoteAccess(order.address, keys, order.ports, accepts=order.owner_key)
    with (
        zmq.Context() as context,
        Courier(context, codec) as courier,
        Mailbox(context, "", codec, remote=access) as mailbox,
    ):
        report(msgspec.json.encode(started(order, mailbox.remote_endpoint, keys.public)).decode())
        batch = _wait_welcome(mailbox)
        welcome = next((item.body for item in batch if isinstance(item, Envelope)), None)
        if isinstance(welcome, Stop):
            return ExitCode.DONE
        if not isinstance(welcome, Welcome):
            raise StartError("the supervisor has not welcomed this agent", f"within {WELCOME_S:g} s")
        courier.keys = CurveKeys(welcome.public_key, welcome.secret_key)
        _run(order, welcome, courier, mailbox, batch, is_daemon=is_daemon)
        courier.close(linger_s=LINGER_S)
    return ExitCode.DONE


def _wait_welcome(mailbox: Mailbox) -> list[Envelope | Malformed]:
    """Return the welcome, or the word to end, and the messages behind it; empty if none comes in time."""
    until = time.monotonic() + WELCOME_S
    while (left_s := until - time.monotonic()) > 0:
        if mailbox.wait(left_s):
            batch = mailbox.drain()
            for at, item in enumerate(batch):
                if isinstance(item, Envelope) and isinstance(item.body, Welcome | Stop):
                    return batch[at:]
                log.warning("ignored before the welcome: %s", item)
    return []


def _run(
    order: AgentOrder,
    welcome: Welcome,
    courier: Courier,
    mailbox: Mailbox,
    batch: list[Envelope | Malformed],
    *,
    is_daemon: bool,
) -> None:
    spec = msgspec.json.decode(welcome.spec, type=DeploymentSpec)
    run = agent_directory(spec, welcome.host)
    lock = take_directory(run)
    try:
        if is_daemon:
            redirect(run.path / LOG_FILE)
        write_keys(run.path / KEYS_FILE, CurveKeys(welcome.public_key, welcome.secret_key))
        name = agent_name(welcome.host)

        def life(spec: DeploymentSpec) -> ChildLife:
            made = ChildLife(name, welcome.incarnation, spec, courier, supervisor=welcome.supervisor)
            made.remote_endpoint = mailbox.remote_endpoint
            return made

        asyncio.run(_live(Agent(spec, run, courier, life, ports=order.ports), mailbox, batch[1:], name))
    finally:
        run.remove()
        os.close(lock)


async def _live(agent: Agent, mailbox: Mailbox, batch: list[Envelope | Malformed], name: str) -> None:
    raise_descriptor_limit()
    loop = asyncio.get_running_loop()
    start_logging(name, agent.spec.log_level, secrets=agent.spec.api.secrets, stream=agent)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.stop, "asked to stop by a signal")
    agent.on_batch(batch)
    mailbox.on_break = agent.link_broken
    mailbox.attach(loop, agent.on_batch)
    try:
        await agent.run()
    finally:
        mailbox.detach()
