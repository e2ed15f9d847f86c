"""Survey of a Ray cluster: facts of all its hosts. Called by `up`, `hosts` and `doctor`."""

from __future__ import annotations

from collections.abc import Sequence

from mstar_core.cluster.calls import SurveyCall, run
from mstar_core.cluster.connection import AUTO, check_listener, split_address
from mstar_core.cluster.facts import ClusterView
from mstar_core.cluster.facts_program import HostQuery


def survey(address: str, distributions: Sequence[str], paths: Sequence[str] = ()) -> ClusterView:
    """Return the living hosts of a cluster. Takes 3 to 6 s.

    address: `HOST:PORT` of its head, or `auto` for the one of this host. distributions: whose versions are read. paths:
    folders whose absence is reported in `HostFacts.missing`. A host that cannot be used is in the view, with a fault.
    Raises ConfigError without Ray or with another version of it, and Unreachable without a cluster.
    """
    if address != AUTO:
        check_listener(*split_address(address))  # here, because it takes seconds to import Ray
    return run(
        SurveyCall(address=address, query=HostQuery(distributions=tuple(distributions), folders=tuple(paths))),
        ClusterView,
    )
