"""Sockets of child processes on two hosts of one machine: messages and tensors by TCP with the deployment's keys."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from mstar_core.config.deployment import DeploymentSpec, HostPlan, Plan
from mstar_core.errors import TransportError
from mstar_core.messages.life import Hello, PeerUp
from mstar_core.messages.tensors import InlineTensor, ShmTensor
from mstar_core.messages.wire import WIRE_VERSION, Envelope
from mstar_core.messages.work import CloseRequest
from mstar_core.process.life import ChildArguments
from mstar_core.process.sockets import ChildSockets, remote_access
from mstar_core.transport import KEYS_FILE, CurveKeys, Mailbox, make_keys, write_keys
from mstar_core.transport.shm import TensorTransport

WAIT_S = 60.0


def spec_on(host: str, folder: Path, keys: CurveKeys | None, *, hosts: tuple[str, ...] = ("", "b")) -> DeploymentSpec:
    """Return the spec as processes of a host read it. Each host has a run directory of its own."""
    run_dir = folder / (host or "supervisor")
    run_dir.mkdir(mode=0o700)
    if keys is not None:
        write_keys(run_dir / KEYS_FILE, keys)
    return DeploymentSpec(
        name="d",
        model="m",
        plugin="p",
        run_dir=str(run_dir),
        log_dir=str(run_dir),
        plan=Plan(ranks=(), placements=()),
        hosts=tuple(HostPlan(name=name, address="127.0.0.1") for name in hosts),
        on_host=host,
    )


class Child:
    """A process with all its sockets."""

    def __init__(self, name: str, spec: DeploymentSpec) -> None:
        self.sockets = ChildSockets(ChildArguments(name, spec, 1, ""))
        self.life = self.sockets.life
        self.tensors: TensorTransport = self.sockets.open_tensors()
        self.mailbox: Mailbox = self.sockets.open_mailbox()

    def meet(self, other: Child) -> None:
        """Take the announcement of another process, as the supervisor sends it."""
        hello: Hello = other.life._hello()
        fields = (hello.endpoint, hello.fd_endpoint, hello.host, hello.remote_endpoint, hello.blob_endpoint)
        names = ("endpoint", "fd_endpoint", "host", "remote_endpoint", "blob_endpoint")
        up = PeerUp(name=hello.name, incarnation=1, **dict(zip(names, fields, strict=True)))
        assert self.life.receive(Envelope(WIRE_VERSION, "supervisor", 0, up)) == (up,)
        self.tensors.connect(up.name, up.fd_endpoint, 1, self.life.blobs_of(up))

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, "nothing came"
            self.mailbox.wait(0.5)
            self.mailbox.drain()


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="mstar-") as path:
        yield Path(path)


@pytest.fixture
def pair(folder: Path) -> Iterator[tuple[Child, Child]]:
    keys = make_keys()
    near, far = Child("api", spec_on("", folder, keys)), Child("worker-0", spec_on("b", folder, keys))
    near.meet(far)
    far.meet(near)
    yield near, far
    near.sockets.close()
    far.sockets.close()


def test_messages_between_hosts_go_by_tcp(pair: tuple[Child, Child]) -> None:
    near, far = pair
    assert near.life.remote_endpoint.startswith("tcp://127.0.0.1:")
    for number in range(3):
        assert near.sockets.courier.send("worker-0", CloseRequest(handle=number))
    received: list[object] = []
    while len(received) < 3:
        assert far.mailbox.wait(WAIT_S)
        received += [each.body for each in far.mailbox.drain() if isinstance(each, Envelope)]
    assert received == [CloseRequest(handle=number) for number in range(3)]


def test_tensors_between_hosts_are_fetched_and_the_end_wakes_the_mailbox(pair: tuple[Child, Child]) -> None:
    near, far = pair
    array = np.arange(500_000, dtype=np.int32)
    ref = far.tensors.put(array, "api")
    assert isinstance(ref, ShmTensor) and near.tensors.is_remote(ref)
    fetch = near.tensors.fetch(ref)
    near.until(lambda: fetch.is_done)
    assert np.array_equal(fetch.result(), array)
    assert isinstance(far.tensors.put(array[:50_000], "api"), InlineTensor), "a fetch would cost a round trip"


def test_a_deployment_of_one_host_opens_no_port(folder: Path) -> None:
    spec = spec_on("", folder, None, hosts=())
    assert remote_access(spec) is None
    child = Child("api", spec)
    hello = child.life._hello()
    assert (hello.host, hello.remote_endpoint, hello.blob_endpoint) == ("", "", "")
    child.sockets.close()


def test_a_host_without_the_keys_is_refused(folder: Path) -> None:
    with pytest.raises(TransportError, match="keys of the deployment"):
        Child("api", spec_on("", folder, None))
