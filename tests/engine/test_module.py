"""Offers of a node's module, with and without the base class."""

from __future__ import annotations

from torch import nn

from mstar_core.engine.module import NodeModule, WarmupRequest, node_module


class Plain(nn.Linear):
    """A module without the base class, as a plugin may have it."""

    listed_ports = ("pixels",)

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.pieces = 2

    def working_bytes(self, tokens: int) -> int:
        return tokens * self.in_features

    def idle(self) -> bool:
        self.pieces -= 1
        return self.pieces > 0


class Based(nn.Linear, NodeModule):
    host_outputs = ("pcm",)

    def warmup_requests(self) -> list[WarmupRequest]:
        return []


def test_a_module_with_the_base_class_offers_itself() -> None:
    module = Based(2, 2)
    offers = node_module(module)
    assert offers is module
    assert tuple(offers.host_outputs) == ("pcm",) and not tuple(offers.host_ports)
    assert not offers.idle() and offers.counters() == {} and offers.graph_counts is None
    assert offers.warms_itself


def test_a_module_without_the_base_class_offers_the_attributes_that_it_has() -> None:
    module = Plain()
    offers = node_module(module)
    assert tuple(offers.listed_ports) == ("pixels",) and not tuple(offers.host_outputs)
    assert offers.working_bytes(3) == 6
    assert [offers.idle(), offers.idle()] == [True, False] and module.pieces == 0
    assert not offers.warms_itself and not list(offers.warmup_requests())


def test_a_function_offers_nothing() -> None:
    offers = node_module(lambda **ports: ports)
    assert offers.working_bytes(100) == 0 and not offers.warms_itself
