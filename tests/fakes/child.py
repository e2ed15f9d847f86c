"""Fake child process (conductor, worker, api or weights) of a real supervisor, with scripted failures.

Started as `python -m tests.fakes.child`. MSTAR_FAKE_CHILDREN holds JSON: name -> Script fields.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.errors import WeightsError
from mstar_core.messages.life import Cordon, Cordoned, Drained, ServiceState
from mstar_core.messages.names import follower_name, weights_name, worker_name
from mstar_core.messages.sleep import Sleep, SleepDone, SleepProgress, Wake
from mstar_core.messages.wire import Envelope, Message, WireCodec
from mstar_core.process.life import ChildLife
from mstar_core.process.logs import start_logging
from mstar_core.supervisor.child import ChildKind
from mstar_core.transport import KEYS_FILE, Courier, Mailbox, RemoteAccess, mailbox_endpoint, read_keys

SCRIPTS = "MSTAR_FAKE_CHILDREN"
WEIGHTS = "MSTAR_FAKE_WEIGHTS"
"""Fingerprint of the weights of a host."""

PHASES = {"weights": ("fetch",), "conductor": (), "api": ("pool",)}
WORKER_PHASES = ("device", "weights", "kv", "kernels", "warm", "capture")


SPOKEN_S: Final = 0.3
MODULE: Final = "tests.fakes.child"


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Scripted failure of a child. phase: when it fails (spawn: before any).

    how: exit, error, signal, hang, deaf, silent or busy (ready, with work waiting and no step running).
    lives: number of lives that fail; 0 means all. grandchild: leave a process that keeps the output open.
    stubborn: ignore Stop and SIGTERM. drains: answer drains, pauses and cordons. busy: a request refuses
    each sleep. wakes: otherwise it dies of a wake.
    """

    phase: str = ""
    how: str = ""
    lives: int = 0
    wait_s: float = 0.0
    grandchild: bool = False
    stubborn: bool = False
    drains: bool = True
    busy: bool = False
    wakes: bool = True

    @classmethod
    def of(cls, name: str, incarnation: int) -> Script:
        """The script of this life of this child."""
        script = cls(**json.loads(os.environ.get(SCRIPTS, "{}")).get(name, {}))
        return cls() if script.lives and incarnation > script.lives else script


def fake_kinds(spec: DeploymentSpec) -> list[ChildKind]:
    """The processes of a deployment, all played by this module."""
    ranks = spec.plan.ranks
    hosts = {worker_name(rank.rank): rank.host for rank in ranks if rank.nodes}
    hosts |= {follower_name(rank.rank): rank.host for rank in ranks if rank.follows}
    return [
        ChildKind(
            name=name,
            module=MODULE,
            arguments=("--name", name),
            has_standby=name.startswith("worker") and not hosts[name],
            host=hosts.get(name, ""),
        )
        for name in ("weights", "conductor", *hosts, "api")
    ]


STANDBY: Final = ChildKind(name="standby", module="mstar_core.process.standby", arguments=(f"{MODULE}:preload",))


def preload(spec: DeploymentSpec) -> None:
    """Play the imports of a standby process, with a scripted failure: exit or hang."""
    script = Script.of("standby", 1)
    print("preloaded by the standby", flush=True)
    match script.how:
        case "exit":
            os._exit(23)
        case "hang":
            signal.pause()


def main() -> None:
    """Entry point: `python -m tests.fakes.child SPEC --incarnation N --supervisor ENDPOINT --name NAME`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("spec", type=Path)
    parser.add_argument("--incarnation", type=int, required=True)
    parser.add_argument("--supervisor", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--listener", type=int)
    parser.add_argument("--store", type=int)
    parser.add_argument("--meet", default="")
    args = parser.parse_args()
    spec = DeploymentSpec.load(args.spec)
    is_weights = args.name == "weights"
    args.name = weights_name(spec.on_host) if is_weights else args.name
    start_logging(args.name)
    if args.meet:
        print(f"meets at {args.meet}", flush=True)
    script = Script.of(args.name, args.incarnation)
    if script.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    codec = WireCodec(args.name, args.incarnation)
    access = None
    if spec.hosts:
        access = RemoteAccess(spec.address, read_keys(Path(spec.run_dir) / KEYS_FILE))
    with zmq.Context() as context, Courier(context, codec, keys=access.keys if access else None) as courier:
        life = ChildLife(args.name, args.incarnation, spec, courier, supervisor=args.supervisor)
        with life.guarded():
            if script.phase == "spawn":
                misbehave(life, "spawn", script)
            if is_weights:
                for phase in PHASES["weights"]:
                    enter(life, phase, script)
                (Path(spec.run_dir) / "weights.folder").write_text(spec.run_dir)
                (Path(spec.run_dir) / "weights.fingerprint").write_text(os.environ.get(WEIGHTS, "same"))
            else:
                endpoint = mailbox_endpoint(spec.ipc_dir, args.name, args.incarnation)
                with Mailbox(context, endpoint, codec, remote=access) as box:
                    life.remote_endpoint = box.remote_endpoint
                    box.on_break = life.link_broken
                    serve(life, box, courier, args.name, script)
        courier.close(linger_s=0.5)


def enter(life: ChildLife, phase: str, script: Script) -> None:
    """Report a phase, and fail in it if the script says so."""
    life.phase(phase, done=1, total=2, detail="part")
    if script.phase != phase:
        life.phase(phase, done=2, total=2)
        return
    misbehave(life, phase, script)


def misbehave(life: ChildLife, phase: str, script: Script) -> None:
    """Run the scripted failure."""
    # A separate thread sends messages: a process that exits at once would lose the last one.
    time.sleep(max(script.wait_s, SPOKEN_S if script.how in ("exit", "signal") else 0.0))
    match script.how:
        case "exit":
            print("plain words before the end", flush=True)
            os._exit(23)
        case "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        case "error":
            raise WeightsError(f"{life.name} lacks a file", "looked in a folder", "use another folder", phase=phase)
        case "deaf":  # the state before a process is prepared: the signal for its stacks ends it
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            signal.pause()
        case "hang":
            while True:  # until the supervisor kills it
                signal.pause()


def serve(life: ChildLife, box: Mailbox, courier: Courier, name: str, script: Script) -> None:
    """Start, become ready, and respond until a stop is requested."""
    life.beat(time.monotonic())
    for phase in PHASES.get(name, WORKER_PHASES):
        enter(life, phase, script)
    if script.grandchild:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    life.phase("ready", facts={"pages": 8})
    while life.stop_reason is None or script.stubborn:
        now = time.monotonic()
        life.beat(now, work_ready=script.how == "busy")
        while life.known and script.phase == "ready" and script.how == "silent":
            signal.pause()
        box.wait(life.wait_s(now))
        for item in box.drain():
            assert isinstance(item, Envelope)
            for message in life.receive(item):
                for answer in (*sleep_answers(message, script), *(answers(message) if script.drains else ())):
                    courier.send("supervisor", answer)


def answers(message: Message) -> Iterator[Message]:
    """Yield the reports of a process without requests."""
    match message:
        case ServiceState():
            yield from (Drained(drain=n) for n in (message.drain, message.pause, message.handover) if n)
        case Cordon():
            yield Cordoned(number=message.number, ranks=message.ranks)


def sleep_answers(message: Message, script: Script) -> Iterator[Message]:
    """Yield the answer of a rank to a sleep or a wake: its one node has 100 bytes on its device."""
    match message:
        case Sleep() if script.busy:
            yield SleepDone(number=message.number, busy=[1])
        case Sleep():
            asleep = {"LLM": message.level}
            yield SleepDone(number=message.number, asleep=asleep, is_whole=True, freed=100, kept=60)
        case Wake() if not script.wakes:
            os._exit(23)
        case Wake():
            yield SleepProgress(number=message.number, done=40, total=100)
            yield SleepDone(number=message.number, freed=100)


if __name__ == "__main__":
    main()
