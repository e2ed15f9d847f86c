"""Views without figures of processes that have ended and of lost hosts. Pure functions, used by all screens."""

from __future__ import annotations

import dataclasses
from typing import Final

import msgspec

from mstar_core.observe.frames import LOCAL, EdgeStatus, GpuStatus, NodeStatus, RankStatus
from mstarctl.top.data.view import View

ENDED: Final = "ended"
SERVING: Final = ("ready", "")


def without_lost(view: View) -> View:
    """Return the view without the last figures of ended ranks and lost hosts, and without rates of idle ranks.

    The figures of a process outlive it until the next report, and in recordings of earlier versions.
    """
    ranks = view.store.ranks
    idle = frozenset(rank.rank for rank in ranks.values() if rank.state not in SERVING)
    if not idle and all(view.is_reached(host) for host in view.store.hosts):
        return view
    store = dataclasses.replace(
        view.store,
        ranks={key: _rank(rank) if rank.state == ENDED else rank for key, rank in ranks.items()},
        nodes={key: _node(node) if node.rank in idle else node for key, node in view.store.nodes.items()},
        edges={
            key: _edge(edge) if {edge.source_rank, edge.into_rank} & idle else edge
            for key, edge in view.store.edges.items()
        },
        gpus={key: gpu if view.is_reached(gpu.host or LOCAL) else _gpu(gpu) for key, gpu in view.store.gpus.items()},
    )
    return dataclasses.replace(view, store=store)


def _rank(rank: RankStatus) -> RankStatus:
    return RankStatus(
        rank=rank.rank,
        host=rank.host,
        device=rank.device,
        gpu=rank.gpu,
        state=rank.state,
        nodes=rank.nodes,
        follows=rank.follows,
        group=rank.group,
        epoch=rank.epoch,
        pages_total=rank.pages_total,
    )


def _gpu(gpu: GpuStatus) -> GpuStatus:
    return GpuStatus(
        index=gpu.index, host=gpu.host, uuid=gpu.uuid, name=gpu.name, memory_total=gpu.memory_total, ranks=gpu.ranks
    )


def _node(node: NodeStatus) -> NodeStatus:
    return NodeStatus(
        name=node.name,
        rank=node.rank,
        partition=node.partition,
        pages_total=node.pages_total,
        slots_total=node.slots_total,
    )


def _edge(edge: EdgeStatus) -> EdgeStatus:
    return msgspec.structs.replace(edge, items_s=0.0, bytes_s=0.0, transfer_ms=None)
