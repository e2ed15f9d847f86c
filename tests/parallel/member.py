"""A process of a tensor-parallel group of two that computes Orpheus' LLM, without a supervisor.

`python -m tests.parallel.member RANK FOLDER JOIN_S [HOST:STORE_PORT:PLAN_PORT ADDRESS SECRET]`. The leader prints
`READY`, answers each line of its input with the ids of the samples as a line of JSON, and stops the group at the end of
its input.
"""

from __future__ import annotations

import json
import sys
import zlib
from dataclasses import replace
from pathlib import Path

from mstar_core.conformance.fake_api import SampleRequest
from mstar_core.conformance.miniature import Miniature
from mstar_core.conformance.nodes import RuntimeSettings, build_nodes, make_runners
from mstar_core.conformance.runtime import LocalRuntime
from mstar_core.conformance.samples import greedy
from mstar_core.conformance.two_ranks import CPU, built, engines
from mstar_core.engine.group.link import GroupEnded, PlanReceiver, PlanSender
from mstar_core.engine.group.plans import Checksum, Compare, StopPlans
from mstar_core.errors import MstarError
from mstar_core.parallel.groups import GroupPlace, RankGroup
from mstar_core.parallel.meeting import Meeting
from tests.families.families import SPECS

NODES = ["LLM"]
SAMPLES = ("sentence", "flushed")
SETTINGS = RuntimeSettings(token_budget=48)
HOSTS = ("hosta", "hostb")


def asks(mini: Miniature) -> list[SampleRequest]:
    names = {f"sample {name!r}" for name in SAMPLES}
    return [replace(greedy(mini.spec, ask), is_journaled=True) for ask in mini.asks if ask.name in names]


def ids_of(mini: Miniature, runtime: LocalRuntime) -> str:
    """Return status, ids and a checksum of the audio of each sample as a line of JSON."""
    outcomes = runtime.ask(*asks(mini))
    return json.dumps([[each.status, repr(each.drawn), zlib.crc32(each.outputs["audio"])] for each in outcomes])


def ids_of_one_rank() -> str:
    mini = Miniature(SPECS["orpheus"])
    return ids_of(mini, mini.runtime(SETTINGS))


def lead(place: GroupPlace, mini: Miniature) -> None:
    with PlanSender(place) as sender:
        sender.accept()
        with RankGroup(place, CPU) as group:
            share = built(mini.spec, mini.folder, NODES, group.shard)
            others = tuple(node for node in mini.spec.nodes if node.name not in NODES)
            whole = build_nodes(replace(mini.spec, nodes=others), mini.folder)
            runtime = LocalRuntime(mini.spec, mini.folder, SETTINGS, built={**whole, **share}, processor=mini.processor)
            mine = {name: runner for worker in runtime.workers for name, runner in worker.runners.items()}
            for engine in engines(mine, NODES).values():
                engine.lead(sender, group.collectives, place.size)
            print("READY", flush=True)
            for _ in sys.stdin:
                print(ids_of(mini, runtime), flush=True)
            sender.publish(StopPlans())


def follow(place: GroupPlace, mini: Miniature) -> None:
    with PlanReceiver(place) as receiver, RankGroup(place, CPU) as group:
        share = built(mini.spec, mini.folder, NODES, group.shard)
        runners = engines(make_runners(share, NODES, SETTINGS, lambda: 0.0, None), NODES)
        nodes = {name: engine.follower(group.collectives) for name, engine in runners.items()}
        while True:
            frame = receiver.receive(0.1)
            for plan in frame.plans if frame is not None else ():
                if isinstance(plan, StopPlans):
                    return
                value = nodes[plan.node].run(plan, receiver.shared)
                if value is not None and isinstance(plan, Compare):
                    receiver.answer(Checksum(index=1, node=plan.node, number=plan.number, value=value))


def main() -> None:
    rank, folder, join_s, *meet = sys.argv[1:]
    meeting = None
    if meet:
        meeting = Meeting.parse(meet[0], address=meet[1], hosts=HOSTS, secret=meet[2].encode())
    place = GroupPlace(
        ranks=(0, 1), rank=int(rank), epoch=1, folder=Path(folder), meeting=meeting, join_s=float(join_s)
    )
    try:
        (lead if place.is_leader else follow)(place, Miniature(SPECS["orpheus"]))
    except GroupEnded as ended:
        sys.exit(f"ENDED {ended.error}")
    except MstarError as error:
        sys.exit(f"FAILED {error}")


if __name__ == "__main__":
    main()
