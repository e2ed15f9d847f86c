"""Placements whose state cannot move between ranks, refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from mstar_core.config.deployment import NodePlacement, Plan, RankPlan
from mstar_core.config.resolved import NodeGroup, ResolvedConfig
from mstar_core.errors import ConfigError
from mstar_core.graph import (
    CLIENT,
    KV_CACHE,
    STATELESS,
    FixedChunk,
    GraphEdge,
    GraphNode,
    KVSpec,
    Loop,
    NodeSpec,
    Sampling,
    Stream,
    StreamingGraphEdge,
)
from mstar_core.plugin import ModelSpec, Partition, Text
from mstarctl.start.movable_state import check_moves
from tests.conductor.test_conductor import MODEL, Params, sing, talk

CONFIG = ResolvedConfig(
    model="m",
    name="m",
    node_groups=(NodeGroup(node_names=("lm", "codec", "step", "source"), ranks=(0,), key="node_groups.0"),),
    provenance={"node_groups.0.node_names": "f.yaml:3"},
)


def apart(node: str, *walks: str, tp_size: int = 1) -> Plan:
    """Each walk of a node on ranks of its own."""
    first = [(index * tp_size, walk) for index, walk in enumerate(walks)]
    placements = [
        NodePlacement(node=node, replicas=(tuple(range(at, at + tp_size)),), walks=(walk,), tp_size=tp_size)
        for at, walk in first
    ]
    others = [
        NodePlacement(node=other, replicas=((0,),)) for other in ("lm", "codec", "step", "source") if other != node
    ]
    count = len(walks) * tp_size
    return Plan(
        ranks=tuple(RankPlan(rank=rank, device="cpu", nodes=()) for rank in range(count)),
        placements=(*placements, *others),
    )


def model(**walks: Any) -> ModelSpec:
    nodes = {
        use.spec.name: use.spec for body in walks.values() for use in [body.body if isinstance(body, Loop) else body]
    }
    return ModelSpec(
        name="toy",
        title="Toy",
        plugin="toy",
        inputs=(Text(),),
        outputs=(Text(),),
        params=Params,
        nodes=tuple(nodes.values()),
        partitions=(Partition(name="p", program=talk, walks=walks),),
    )


def test_a_cache_may_move() -> None:
    check_moves(MODEL, CONFIG, apart("lm", "prefill", "decode"))


def test_caches_of_tensor_parallel_groups_stay() -> None:
    with pytest.raises(ConfigError, match="tensor-parallel groups do not move") as caught:
        check_moves(MODEL, CONFIG, apart("lm", "prefill", "decode", tp_size=2))
    assert "prefill on ranks 0, 1; decode on ranks 2, 3" in caught.value.detail


def test_a_cache_of_two_partitions_stays() -> None:
    (talking, singing) = MODEL.partitions
    other = Partition(name="again", program=sing, walks={"more": talking.walks["prefill"]})
    both = ModelSpec(
        name="toy",
        title="Toy",
        plugin="toy",
        inputs=(Text(),),
        outputs=MODEL.outputs,
        params=Params,
        nodes=MODEL.nodes,
        streams=MODEL.streams,
        partitions=(talking, singing, other),
    )
    with pytest.raises(ConfigError, match="partitions talk and again run it side by side"):
        check_moves(both, CONFIG, apart("lm", "prefill", "more"))


def test_a_value_that_a_later_walk_goes_on_from_stays() -> None:
    step = NodeSpec(name="step", engine=STATELESS, ports={"x": "f32[n]"})
    use = GraphNode(step, ("x",), (GraphEdge("x", CLIENT, modality="text"),))
    loop = Loop("loop", GraphNode(step, ("x",)), carry={"x": "x"})
    with pytest.raises(ConfigError, match="a later walk may go on from its last 'x'"):
        check_moves(model(first=use, then=loop), CONFIG, apart("step", "first", "then"))


def test_a_stateless_node_that_feeds_a_stream_stays() -> None:
    sink = NodeSpec(
        name="lm",
        engine=KV_CACHE,
        ports={"tokens": "i64[n]", "token": "i64[1]"},
        kv=KVSpec(layers=1, kv_heads=1, head_dim=2),
        sampling=Sampling(port="token"),
    )
    stream = Stream("ids", into=(sink, "tokens"), chunk=FixedChunk(1))
    source = NodeSpec(name="source", engine=STATELESS, ports={"y": "i64[1]"})
    use = GraphNode(source, (), (StreamingGraphEdge("y", stream),))
    with pytest.raises(ConfigError, match="it feeds a stream"):
        check_moves(model(first=use, then=use), CONFIG, apart("source", "first", "then"))
