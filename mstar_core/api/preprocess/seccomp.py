"""Seccomp filter that denies network access to pool processes, which decode untrusted files. Called by `child`.

The filter (BPF, permanent) makes `socket()` fail with EACCES for every family but AF_UNIX. Open descriptors, such as
the pipe to the api, keep working. Source: seccomp(2), the kernel's linux/seccomp.h and linux/filter.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
from typing import Final

from mstar_core.errors import StartError

ARCHITECTURES: Final = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
"""AUDIT_ARCH and the number of socket(), by machine."""

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
LOAD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, DENY = 0x7FFF0000, 0x00050000
NUMBER_AT, ARCH_AT, FIRST_ARGUMENT_AT = 0, 4, 16


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def deny_network() -> bool:
    """Deny new network sockets to this process. Returns False if the machine is not supported.

    Raises StartError if the kernel refuses the filter.
    """
    known = ARCHITECTURES.get(platform.machine())
    if known is None:
        return False
    code = _code(*known)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)):
        if libc.prctl(*call):
            why = os.strerror(ctypes.get_errno())
            raise StartError(
                "the network access of a pool process cannot be disabled",
                why,
                "the kernel must support seccomp",
                phase="pool",
            )
    return True


def _code(architecture: int, number: int) -> bytes:
    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    return b"".join(
        (
            step(LOAD, ARCH_AT),
            step(JUMP_EQUAL, architecture, 0, 5),
            step(LOAD, NUMBER_AT),
            step(JUMP_EQUAL, number, 0, 3),
            step(LOAD, FIRST_ARGUMENT_AT),
            step(JUMP_EQUAL, int(socket.AF_UNIX), 1, 0),
            step(RETURN, DENY | errno.EACCES),
            step(RETURN, ALLOW),
        )
    )
