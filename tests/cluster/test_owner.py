"""Names of reservations tell whose they are, and whether their owner lives."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec

from mstar_core.cluster.owner import Owner, Reservation, begun, reservation, this_process


def test_the_name_of_a_reservation_can_be_read() -> None:
    for host in ("node-b", ""):
        item = Reservation("speech.1", this_process(), host)
        assert reservation(str(item)) == item
    for stranger in ("", "mstar", "their group", "mstar/a/b/c/d/e", "other/a/b/1/2/e"):
        assert reservation(stranger) is None


def test_an_owner_has_ended_when_its_process_has() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = msgspec.structs.replace(this_process(), pid=process.pid, begun=begun(process.pid))
    assert not owner.has_ended()
    process.communicate(b"\n")
    assert owner.has_ended()


def test_another_process_with_the_same_number_is_not_the_owner() -> None:
    owner = this_process()
    assert msgspec.structs.replace(owner, begun=owner.begun - 1).has_ended()


def test_processes_of_other_hosts_count_as_alive() -> None:
    assert not Owner(host="another-host", pid=os.getpid(), begun=1).has_ended()
