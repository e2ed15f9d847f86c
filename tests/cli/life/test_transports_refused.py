"""Transports that this host, its library or the file do not support are refused before anything starts."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mstar_core.config.deployment import Plan
from mstar_core.config.files.load import read_text
from mstar_core.config.resolved import ResolvedConfig
from mstar_core.errors import ConfigError, ExitCode, TransportError
from mstar_core.host import network
from mstarctl.plugins import Plugins
from mstarctl.start.target import Override, resolve_with
from mstarctl.start.transports import check_transport, transport_cautions, unused_transport
from tests.cli.life.conftest import own_port
from tests.fakes.mooncake import MISSING, needs_mooncake, transfer_ports

FILE = """\
model: orpheus:tiny
node_groups:
  - {node_names: [LLM], ranks: [0]}
  - {node_names: [snac_decoder], ranks: [1]}
transport:
"""
Lines = Callable[..., tuple[ResolvedConfig, Plan]]


@pytest.fixture
def planned() -> Lines:
    """Return the configuration and plan of a file with these lines of the section `transport`, from line 6 on."""
    plugins = Plugins.discover()

    def made(*lines: str, options: tuple[Override, ...] = ()) -> tuple[ResolvedConfig, Plan]:
        file = read_text(FILE + "".join(f"  {line}\n" for line in lines or ("{}",)), "split.yaml")
        spec = plugins.model("orpheus")
        config = resolve_with(spec, file, options)
        return config, plugins.plan(spec, config, ("cpu",))

    return made


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with the library, whether or not this one has it."""
    monkeypatch.setattr("mstarctl.start.transports.transfer_engine", lambda: None)


def refused(planned: tuple[ResolvedConfig, Plan]) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        check_transport(*planned)
    return error.value


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("lines", "line", "key", "title", "hint"),
    [
        (("port: 9000",), 6, "transport.port", "transport.protocol is SHM", "remove it"),
        (("protocol: SHM", "device: eth0"), 7, "transport.device", "transport.protocol is SHM", "remove it"),
        (("protocol: RDMA",), 6, "transport.protocol", "no RDMA adapter", "use the protocol TCP"),
        (("protocol: TCP", "device: lp"), 7, "transport.device", "no interface and no address 'lp'", "choose one of"),
        (("protocol: TCP", "device: 192.0.2.7"), 7, "transport.device", "no address '192.0.2.7'", ""),
        (("protocol: TCP", "port: 65530"), 7, "transport.port", "ports 65530 to 65561 are needed", "at most 65504"),
        (("protocol: TCP", "port: 7990"), 7, "transport.port", "the api's port 8000 is among", "choose another"),
    ],
)
def test_a_file_is_refused_with_its_line_and_what_to_change(
    planned: Lines, lines: tuple[str, ...], line: int, key: str, title: str, hint: str
) -> None:
    error = refused(planned(*lines))
    assert (error.facts["file"], error.facts["line"], error.facts["key"]) == ("split.yaml", line, key)
    assert title in error.title and hint in error.hint


@pytest.mark.parametrize("value", ["TCPP", "[SHM, TCP]", "tcp"])
def test_a_protocol_that_does_not_exist_or_two_of_them_are_refused(planned: Lines, value: str) -> None:
    with pytest.raises(ConfigError) as error:
        planned(f"protocol: {value}")
    assert (error.value.facts["line"], error.value.facts["key"]) == (6, "transport.protocol")


def host_with(monkeypatch: pytest.MonkeyPatch, folder: Path, **states: str) -> None:
    """Make a host with RDMA adapters, by name, whose port is in a state."""
    for name, state in states.items():
        port = folder / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
    monkeypatch.setattr(network, "ADAPTERS", folder)


@pytest.mark.usefixtures("loaded")
def test_rdma_takes_adapters_and_tcp_takes_interfaces(
    planned: Lines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host_with(monkeypatch, tmp_path, mlx5_0="4: ACTIVE", mlx5_1="4: ACTIVE")
    port = f"port: {transfer_ports()}"
    for device in ("mlx5_0", "mlx5_0,mlx5_1"):
        check_transport(*planned("protocol: RDMA", f"device: {device!r}", port))
    check_transport(*planned("protocol: RDMA", port))
    check_transport(*planned("protocol: TCP", "device: lo", port))
    assert "lo is a network interface" in refused(planned("protocol: RDMA", "device: lo", port)).title
    assert "'mlx5_1'" in refused(planned("protocol: RDMA", "device: mlx5_2", port)).hint
    mixed = refused(planned("protocol: TCP", "device: mlx5_0", port))
    assert "RDMA adapter" in mixed.title and "RDMA" in mixed.hint and mixed.facts["line"] == 7


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (ModuleNotFoundError("No module named 'mooncake'"), "pip install 'mstarctl[mooncake]'"),
        (ImportError("libcudart.so.12: cannot open"), "mooncake-transfer-engine-non-cuda"),
        (ImportError("libibverbs.so.1: cannot open"), "apt-get install libibverbs1"),
    ],
)
def test_a_missing_library_names_its_package(
    planned: Lines, monkeypatch: pytest.MonkeyPatch, error: ImportError, hint: str
) -> None:
    def broken(name: str) -> None:
        raise error

    monkeypatch.setattr(network.importlib, "import_module", broken)
    actual = refused(planned("protocol: TCP"))
    assert hint in actual.hint and str(error) in actual.detail and actual.facts["line"] == 6


@pytest.mark.usefixtures("loaded")
def test_a_rank_without_free_ports_is_named(planned: Lines) -> None:
    first = transfer_ports()
    taken = [socket.create_server(("127.0.0.1", first + 16 + number)) for number in range(3)]
    try:
        error = refused(planned("protocol: TCP", f"port: {first}"))
    finally:
        for listener in taken:
            listener.close()
    assert "rank 1 has no two free ports" in error.title and error.facts["line"] == 7


def test_settings_of_a_single_rank_have_no_effect() -> None:
    plugins = Plugins.discover()
    spec = plugins.model("orpheus")
    file = read_text(
        "model: orpheus\ntransport: {protocol: TCP}\nnode_groups: [{node_names: [LLM, snac_decoder], ranks: [0]}]\n",
        "f",
    )
    config = resolve_with(spec, file)
    plan = plugins.plan(spec, config, ("cpu",))
    check_transport(config, plan)
    assert "transport.protocol TCP has no effect: there is one rank" in unused_transport(config, plan)[0]


def test_an_option_for_shm_overrules_the_file_and_its_port_is_unused(planned: Lines) -> None:
    shm = Override(key="transport.protocol", value="SHM", source="--tensor-comm-protocol")
    config, plan = planned("protocol: TCP", "port: 9000", options=(shm,))
    check_transport(config, plan)
    assert "transport.port 9000 has no effect" in unused_transport(config, plan)[0]
    assert transport_cautions(config, plan) == ()


@needs_mooncake
def test_options_reach_the_specification(tool: Callable[..., Any], tmp_path: Path) -> None:
    port = str(transfer_ports())
    words = ("--tensor-comm-protocol", "tcp", "--mooncake-port", port, "--tcp-transfer-device", "lo")
    said = tool("up", "orpheus_disaggregated:tiny", "--dry-run", "--device", "cpu", *words, *own_port())
    assert said.code == 0, said.err
    assert "no effect" not in said.err and f"ports {port} to {int(port) + 31} must be reachable" in said.err


@pytest.mark.skipif(not MISSING, reason="the library is installed")
def test_without_the_library_the_option_is_refused(tool: Callable[..., Any]) -> None:
    said = tool("up", "orpheus_disaggregated:tiny", "--dry-run", "--tensor-comm-protocol", "TCP", *own_port())
    assert said.code == ExitCode.INVALID and "--tensor-comm-protocol" in said.err and "install" in said.err


def test_an_address_of_another_host_is_not_ours() -> None:
    assert network.own_address(None) == "127.0.0.1" and network.own_address("localhost").startswith("127.")
    with pytest.raises(TransportError, match="no interface"):
        network.own_address("192.0.2.7")


def test_an_adapter_without_an_active_port_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    host_with(monkeypatch, tmp_path, mlx5_0="1: DOWN", mlx5_1="4: ACTIVE")
    network.check_adapters("mlx5_1")
    with pytest.raises(TransportError, match="no port of RDMA adapter mlx5_0 is active"):
        network.check_adapters("mlx5_0,mlx5_1")
