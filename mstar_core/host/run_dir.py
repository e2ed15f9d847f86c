"""Run directory of a deployment on this host. Used by `up`, `ps` and the supervisor."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mstar_core.config.name import check_name
from mstar_core.errors import ConfigError, StartError
from mstar_core.host.aliases import hidden_path, links_to, name_of, next_link, target_of
from mstar_core.host.folders import obstacle
from mstar_core.host.groups import closed_to
from mstar_core.host.private_files import exposure

SOCKET_PATH_LIMIT: Final = 107
"""Maximum length of a Unix socket's path in bytes (108 with the closing NUL)."""

LONGEST_SOCKET: Final = "ipc/worker-000.000.fd"
OWN_ROOT: Final = "~/.mstar"
GATEWAYS: Final = ".gateways"
"""Folder of the run directories of gateways; hidden, so that none is taken for a deployment."""

LOCK_PAUSE_S: Final = 0.02
LOOKS_S: Final = 10.0
"""Longest time that looks of other processes delay the one that takes a lock. On a busy host a look may take long."""


def runtime_root() -> Path:
    """Return the folder of all run directories: $MSTAR_RUNTIME_DIR, $XDG_RUNTIME_DIR/mstar, or TMPDIR/mstar-UID."""
    chosen = os.environ.get("MSTAR_RUNTIME_DIR")
    if chosen:
        return Path(chosen)
    session = os.environ.get("XDG_RUNTIME_DIR")
    return Path(session) / "mstar" if session else Path(tempfile.gettempdir()) / f"mstar-{os.getuid()}"


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of one deployment's run directory. The supervisor holds its lock until it exits."""

    path: Path

    @classmethod
    def of(cls, name: str) -> RunDirectory:
        """Return the run directory of the deployment called `name`, which need not exist."""
        return cls(runtime_root() / check_name(name))

    @classmethod
    def of_gateway(cls, name: str) -> RunDirectory:
        """Return the run directory of the gateway called `name`, which need not exist."""
        return cls(runtime_root() / GATEWAYS / check_name(name))

    @property
    def name(self) -> str:
        return name_of(self.path)

    @property
    def real(self) -> RunDirectory:
        """The directory itself, if this path is the name of a deployment that replaced another one."""
        target = target_of(self.path)
        return self if target is None else RunDirectory(target)

    @property
    def successor(self) -> RunDirectory:
        """A new directory for the deployment that takes over this one's name."""
        return RunDirectory(hidden_path(self.path.with_name(self.name)))

    @property
    def handover_socket(self) -> Path:
        return self.path / "handover.sock"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def spec(self) -> Path:
        return self.path / "spec.json"

    @property
    def admin_socket(self) -> Path:
        return self.path / "admin.sock"

    @property
    def ipc(self) -> Path:
        return self.path / "ipc"

    @property
    def children(self) -> Path:
        return self.path / "children"

    @property
    def uploads(self) -> Path:
        return self.path / "uploads"

    def check_length(self) -> None:
        """Raise ConfigError if the paths of the sockets inside would be too long."""
        size = len(os.fsencode(self.path / LONGEST_SOCKET))
        if size > SOCKET_PATH_LIMIT:
            raise ConfigError(
                "the run directory's path is too long for sockets",
                f"{self.path}: {size} bytes, at most {SOCKET_PATH_LIMIT}",
                "set MSTAR_RUNTIME_DIR to a shorter folder or choose a shorter --name",
                key="name",
            )

    def check_usable(self) -> None:
        """Raise ConfigError if the directory cannot be made or is not private. Writes nothing."""
        self.check_length()
        why = obstacle(self.path)
        if why:
            raise ConfigError(
                "the run directory cannot be written",
                f"{self.path}: {why}",
                "set MSTAR_RUNTIME_DIR to a folder that you own",
            )

    def create(self, gid: int | None = None) -> None:
        """Create the directory (0700) and its folders. gid: a group that may enter it (0710) for the admin socket only.

        Raises ConfigError if it cannot be written, another user could replace it, or the group cannot reach it.
        """
        self.check_length()
        mode = 0o700 if gid is None else 0o710
        if self.real is not self and self.path.lstat().st_uid == os.getuid() and self.holder() is None:
            self.remove()  # the name of a deployment whose supervisor was killed
        try:
            for folder in (self.path.parent, self.path):
                if not folder.is_dir():
                    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                    self._open_to(folder, gid)
                if folder == self.path.parent:
                    check_unexposed(folder)
            check_own(self.path)
            self._open_to(self.path, gid)
            for folder in (self.ipc, self.children, self.uploads):
                folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                "the run directory cannot be written",
                f"{self.path}: {error.strerror}",
                "set MSTAR_RUNTIME_DIR to a folder that you own",
            ) from error
        facts = self.path.stat()
        if facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) & 0o777 & ~mode:
            raise ConfigError(
                "the run directory is open to other users",
                f"{self.path}: owner {facts.st_uid}, mode {stat.S_IMODE(facts.st_mode):o}",
                f"run: chmod 700 {self.path}",
            )

        closed = None if gid is None else closed_to(self.path, gid)
        if closed is not None:
            raise ConfigError(
                "the admin group cannot reach the run directory",
                f"its members cannot enter {closed}",
                "choose a --socket-path-prefix that they can enter, such as a folder under /var/run",
                key="admin_group",
            )

    @staticmethod
    def _open_to(folder: Path, gid: int | None) -> None:
        if gid is not None:
            os.chown(folder, -1, gid)
            folder.chmod(0o710)

    def holder(self) -> int | None:
        """Return the pid of the process that holds the lock, None if the lock is free, 0 if the pid is unknown."""
        try:
            with self.lock.open() as file:
                if try_lock(file.fileno(), fcntl.LOCK_SH):  # shared, so that no other look takes this one for a holder
                    return None
                text = file.read().strip()  # of the open file: a deployment that ends removes its name first
                return int(text) if text.isdigit() else 0
        except OSError:
            return None

    def acquire(self) -> int:
        """Take the lock, write the pid and return the descriptor to keep open. Raises StartError if it is held."""
        fd = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if not lock_soon(fd) or not self._is_lock(fd):  # a deployment that just ended removed the directory
                raise BlockingIOError
        except BlockingIOError:
            os.close(fd)
            raise self.running_error(self.holder() or 0) from None
        os.ftruncate(fd, 0)
        os.write(fd, str(os.getpid()).encode())
        return fd

    def running_error(self, pid: int) -> StartError:
        """Return the error of a second start with this name. pid: 0 if unknown."""
        detail = f"pid {pid}" if pid else "its pid is unknown"
        return StartError(
            f"deployment {self.name!r} is already running",
            detail,
            f"stop it with: mstarctl down {self.name}, or choose another --name and --port",
            phase="plan",
            code="name_in_use",
        )

    def _is_lock(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), self.lock.stat())
        except FileNotFoundError:
            return False

    def clean(self) -> None:
        """Remove the files of an earlier start. The caller holds the lock."""
        for folder in (self.ipc, self.children, self.uploads):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        self.admin_socket.unlink(missing_ok=True)
        self.handover_socket.unlink(missing_ok=True)

    def announce(self) -> None:
        """Make the directory known as NAME.next. The caller holds its lock. Raises StartError if the name is in use."""
        link = RunDirectory(next_link(self.path))
        if (pid := link.holder()) is not None:
            raise link.running_error(pid)
        link.discard()
        try:
            link.path.unlink(missing_ok=True)
            link.path.symlink_to(self.path.name)
        except OSError as error:
            hint = f"remove {link.path}, or stop the deployment of this name"
            raise StartError(f"{link.path} cannot be made", error.strerror or "", hint, phase="plan") from error

    def take_name(self) -> None:
        """Become known as NAME, which the replaced deployment had. It has ended. Raises OSError."""
        named = self.path.with_name(self.name)
        if not named.is_symlink():
            RunDirectory(named).discard()  # its supervisor was killed
        next_link(self.path).rename(named)

    def discard(self) -> None:
        """Remove the directory unless a supervisor holds its lock: what a start leaves that ended before it began."""
        if self.path.is_dir() and self.holder() is None:
            self.remove()

    def remove(self) -> None:
        """Remove the directory and its names. The caller holds the lock.

        It is renamed first, so that a later start never sees it half removed.
        """
        path = self.real.path
        for link in links_to(path):
            link.unlink(missing_ok=True)
        ended = path.with_name(f".{self.name}.ended-{os.getpid()}")
        try:
            path.rename(ended)
        except OSError:
            ended = path
        shutil.rmtree(ended, ignore_errors=True)


def check_unexposed(root: Path) -> None:
    """Raise ConfigError if another user could replace the run directories in `root`."""
    why = exposure(root)
    if why is not None:
        raise ConfigError(
            "the folder of the run directories is open to other users",
            why,
            f"set MSTAR_RUNTIME_DIR to a folder of your own that no one else can write (chmod 700), such as {OWN_ROOT}",
        )


def check_own(path: Path) -> None:
    """Raise ConfigError if a run directory is a link or belongs to another user."""
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        kind = "a folder" if stat.S_ISDIR(facts.st_mode) else "a link or a file"
        raise ConfigError(
            "the run directory is open to other users",
            f"{path} is {kind} of uid {facts.st_uid}",
            "remove it, or set MSTAR_RUNTIME_DIR to a folder of your own",
        )


def lock_soon(fd: int, limit_s: float = LOOKS_S) -> bool:
    """Take the lock of an open file, False if another process keeps it.

    limit_s: for processes that only look at it, such as `holder`. They hold a shared lock for a moment.
    """
    end = time.monotonic() + limit_s
    while not try_lock(fd, fcntl.LOCK_EX):
        if not try_lock(fd, fcntl.LOCK_SH) or time.monotonic() > end:
            return False
        fcntl.flock(fd, fcntl.LOCK_UN)
        time.sleep(LOCK_PAUSE_S)
    return True


def try_lock(fd: int, kind: int) -> bool:
    """Take a lock of an open file, LOCK_SH or LOCK_EX, unless another open file has one that excludes it."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def deployments(root: Path | None = None) -> Iterator[RunDirectory]:
    """Yield the run directories with a spec below `root`, running or stale, sorted by name."""
    root = runtime_root() if root is None else root
    if not root.is_dir():
        return
    for path in sorted(root.iterdir()):
        if not path.name.startswith(".") and (path / "spec.json").is_file():
            yield RunDirectory(path)


def gateways() -> Iterator[RunDirectory]:
    """Yield the run directories of gateways, running or stale, sorted by name."""
    yield from deployments(runtime_root() / GATEWAYS)
