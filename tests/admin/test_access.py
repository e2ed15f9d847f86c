"""Permissions of the admin socket: mode of the file, uid of the peer, admin group, and the path that is bound."""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import stat
import sys
from pathlib import Path

import pytest

from mstar_core.admin.access import Access, Peer, access_of, bind_admin
from mstar_core.errors import ConfigError, Refused, StartError
from mstar_core.host.groups import closed_to, group_id
from mstar_core.host.run_dir import RunDirectory
from tests.admin.conftest import Serving

ASK = """
import http.client, os, socket, sys
path, method, target, uid, gid = sys.argv[1:]
os.setgroups([]); os.setgid(int(gid)); os.setuid(int(uid))
connection = http.client.HTTPConnection("admin")
connection.sock = socket.socket(socket.AF_UNIX); connection.sock.connect(path)
connection.request(method, target)
answer = connection.getresponse()
print(answer.status, answer.read().decode())
"""


def second_user() -> pwd.struct_passwd:
    """Return another user of this host, if this process can become one."""
    if os.getuid() != 0:
        pytest.skip("runs as root, which can act as a second user")
    try:
        return pwd.getpwnam("nobody")
    except KeyError:
        pytest.skip("runs where the unprivileged system user exists")


async def ask_as(path: Path, method: str, target: str, uid: int, gid: int) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ASK, str(path), method, target, str(uid), str(gid), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    return said.decode()


async def test_another_user_is_refused_even_if_the_file_mode_allows_it(started: Serving) -> None:
    other = second_user()
    async with started() as admin:
        admin.path.parent.chmod(0o755)
        admin.path.chmod(0o666)
        said = await ask_as(admin.path, "GET", "/v1/health", other.pw_uid, other.pw_gid)
        assert said.startswith("403 ") and f"peer uid {other.pw_uid}" in said


async def test_a_member_of_the_admin_group_can_read_only(started: Serving) -> None:
    other = second_user()
    async with started(gid=other.pw_gid) as admin:
        admin.path.parent.chmod(0o755)
        assert stat.S_IMODE(admin.path.stat().st_mode) == 0o660
        read = await ask_as(admin.path, "GET", "/v1/health", other.pw_uid, other.pw_gid)
        assert read.startswith("200 ")
        act = await ask_as(admin.path, "POST", "/v1/deployment/drain", other.pw_uid, other.pw_gid)
        assert act.startswith("403 ") and "may only read" in act
        assert admin.deployment.acts == []


def test_access_depends_on_uid_then_on_group() -> None:
    assert access_of(Peer(1, 500, 500), None, owner=500) is Access.ALL
    assert access_of(Peer(1, 0, 0), None, owner=500) is Access.ALL
    assert access_of(Peer(1, 501, 77), 77, owner=500) is Access.READ
    for gid in (None, 78):
        with pytest.raises(Refused):
            access_of(Peer(1, 501, 77), gid, owner=500)


def test_a_path_of_109_bytes_is_refused_with_its_length(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * (108 - len(str(tmp_path)) - len("/admin.sock")))
    path = folder / "admin.sock"
    assert len(str(path)) == 109
    with pytest.raises(StartError) as error:
        bind_admin(path)
    assert "109 bytes, at most 107" in error.value.detail
    assert "--socket-path-prefix" in error.value.hint


def test_the_file_of_a_killed_supervisor_is_replaced(runtime_folder: Path) -> None:
    path = runtime_folder / "admin.sock"
    bind_admin(path).close()
    assert path.exists()
    sock = bind_admin(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    sock.close()


def test_the_umask_is_restored(runtime_folder: Path) -> None:
    before = os.umask(0o022)
    try:
        bind_admin(runtime_folder / "admin.sock").close()
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_an_unknown_group_is_an_error_with_the_nearest_name() -> None:
    name = grp.getgrgid(0).gr_name
    assert group_id(name) == 0
    with pytest.raises(ConfigError) as error:
        group_id(name + "x")
    assert repr(name) in error.value.hint


def test_the_run_directory_is_opened_for_a_group_only_if_the_group_can_reach_it(runtime_folder: Path) -> None:
    gid = os.getgid()
    runtime_folder.chmod(0o755)
    run = RunDirectory(runtime_folder / "prefix" / "name")
    run.create(gid)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (run.path.parent, run.path)} == {0o710}
    assert stat.S_IMODE(run.ipc.stat().st_mode) == 0o700
    shut = runtime_folder / "shut"
    shut.mkdir(mode=0o700)
    assert closed_to(shut, gid) == shut
    with pytest.raises(ConfigError, match="cannot reach") as error:
        RunDirectory(shut / "name").create(gid)
    assert str(shut) in error.value.detail
