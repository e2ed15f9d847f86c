"""Comparison of what a host of a cluster has installed with what this host has. Used by `up` and `doctor`."""

from __future__ import annotations

from collections.abc import Mapping

from mstar_core.cluster.facts import NAME_FAULT, HostFacts
from mstar_core.errors import StartError

MINORS = ("python",)
"""Names whose versions are compared without their last part."""


def obstacle(host: HostFacts, needed: Mapping[str, str]) -> str:
    """Return why a host cannot run ranks, empty if it can. needed: versions of this host by name."""
    if host.fault:
        return host.fault
    for name, version in needed.items():
        there = host.versions.get(name, "")
        if not there:
            return f"{name} is not installed there"
        if compared(name, there) != compared(name, version):
            return f"it has {name} {there}, and this host has {version}"
    return ""


def compared(name: str, version: str) -> str:
    """Return the part of a version that has to be equal on all hosts."""
    return ".".join(version.split(".")[:2]) if name in MINORS else version


def unusable(host: HostFacts, why: str, needed: Mapping[str, str]) -> StartError:
    """Return the error for a named host that cannot run ranks."""
    packages = " ".join(f"{name}=={version}" for name, version in needed.items() if name not in MINORS)
    hint = f"install the same there: pip install {packages}; or use other hosts"
    if compared("python", host.versions.get("python", "")) != compared("python", needed["python"]) and not host.fault:
        hint = f"use Python {compared('python', needed['python'])} on all hosts, or use other hosts"
    if host.fault == NAME_FAULT:
        hint = "give it another host name, then start Ray there again"
    return StartError(f"host {host.name} cannot run ranks of this deployment", why, hint, phase="plan", code="bad_host")
