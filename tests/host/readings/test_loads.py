"""Loads of the host, from copies of the files of /proc."""

from __future__ import annotations

from pathlib import Path

from mstar_core.host.readings.loads import HostLoads

MEMORY = {"MemTotal": 1000, "MemFree": 100, "MemAvailable": 400, "SwapTotal": 200, "SwapFree": 150}


def network(name: str, got: int, sent: int) -> str:
    return f"  {name}{got} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0\n"


def disk(name: str, read: int, written: int) -> str:
    return f"   8 0 {name} 1 0 {read} 0 1 0 {written} 0 0 0 0\n"


def write(proc: Path, *, busy: tuple[int, int], got: int, sent: int, read: int, written: int) -> None:
    """Write the files: two cores with 100 ticks of idle time each, and counters."""
    (proc / "net").mkdir(exist_ok=True)
    cores = "".join(f"cpu{n} {ticks} 0 0 100 0 0 0 0 0 0\n" for n, ticks in enumerate(busy))
    (proc / "stat").write_text(f"cpu  {sum(busy)} 0 0 200 0 0 0 0 0 0\n{cores}ctxt 1\n")
    (proc / "meminfo").write_text(
        "".join(f"{name}: {kib} kB\n" for name, kib in MEMORY.items()) + "HugePages_Total: 0\n"
    )
    (proc / "net" / "dev").write_text(
        "face |bytes\n" + network("lo: ", got, got) + network("eth0: ", got, sent) + network("eth1:", got, 0)
    )
    names = ("sda", "sda1", "nvme0n1p1", "dm-0")
    (proc / "diskstats").write_text("".join(disk(name, read, written) for name in names) + disk("nvme0n1", read, 0))


def test_shares_and_rates_are_of_the_time_since_the_last_reading(tmp_path: Path) -> None:
    """Loopback, partitions and mapped devices count for nothing, because others stand for them."""
    loads = HostLoads(proc=tmp_path)
    write(tmp_path, busy=(0, 0), got=1000, sent=0, read=0, written=0)
    first = loads.read(10.0)
    assert (first.cores, first.net_in_s, first.disk_read_s) == ([], 0, 0)
    assert (first.memory_used, first.memory_total, first.swap_used, first.swap_total) == (
        600 * 1024,
        1000 * 1024,
        50 * 1024,
        200 * 1024,
    )
    write(tmp_path, busy=(300, 0), got=3000, sent=500, read=10, written=4)
    second = loads.read(12.0)
    assert second.cores == [1.0, 0.0]
    assert (second.net_in_s, second.net_out_s) == (2000, 250)
    assert (second.disk_read_s, second.disk_write_s) == (2 * 10 * 512 // 2, 4 * 512 // 2)


def test_a_host_without_these_files_has_no_loads(tmp_path: Path) -> None:
    assert HostLoads(proc=tmp_path / "none").read(1.0).memory_total == 0


def test_this_host_has_cores_and_memory() -> None:
    loads = HostLoads()
    loads.read(1.0)
    found = loads.read(2.0)
    assert found.cores and found.memory_total > found.memory_used > 0
