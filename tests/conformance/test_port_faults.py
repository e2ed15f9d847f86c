"""Mistakes of an author at the borders of nodes and walks, served: each ends its own request with its cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mstar_core.conformance.fake_api import RequestOutcome, SampleRequest
from mstar_core.conformance.miniature import Miniature
from mstar_core.graph import STATELESS, GraphEdge, GraphNode, NodeSpec, Sequential
from mstar_core.plugin import Partition, ProgramRequest, Run
from mstar_core.plugin.program import ProgramGenerator
from mstar_core.plugin.spec import ModelSpec
from tests.conformance import flawed

HERE = __name__
BAD = 4
"""Length of the text that a faulty part trips over."""


class Tone(nn.Module):
    """Sounds of all texts but the bad ones, which get another output."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        pcm = (tokens * 7).to(torch.int16)
        if tokens.shape[1] != BAD:
            return {"pcm": pcm}
        return {
            "name": {"sound": pcm},
            "missing": {},
            "type": {"pcm": pcm.float()},
            "shape": {"pcm": pcm[:, :, None]},
            "number": {"pcm": 3},
            "list": [pcm],
        }[self.fault]  # type: ignore[return-value]


class Model(flawed.Model):
    fault = ""

    def get_submodule(self, node: NodeSpec) -> nn.Module:
        return Tone(self.fault)


def served(spec: ModelSpec) -> list[RequestOutcome]:
    """Serve a bad request between two good ones."""
    return Miniature(spec).runtime().ask(*(SampleRequest(text=text) for text in ("hello", "x" * BAD, "you")))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("name", "node tone returned no 'pcm', which its walk takes"),
        ("missing", "expected 'pcm' i16[samples]; the module returned nothing"),
        ("type", "node tone returned 'pcm' as f32[1,4]; declared is i16[samples]"),
        ("shape", "node tone returned 'pcm' as i16[1,4,1]; declared is i16[samples]"),
        ("number", "node tone returned 'pcm' as int, not as a tensor"),
        ("list", "node tone returned list"),
    ],
)
def test_a_node_that_breaks_its_ports_fails_that_request_alone(
    fault: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "fault", fault)
    good, bad, other = served(replace(flawed.GOOD, model=f"{HERE}:Model"))
    assert bad.status == "failed" and told in bad.cause
    assert {good.status, other.status} == {"finished"} and good.items and other.items


def test_a_mistyped_output_between_two_nodes_names_the_node_that_returned_it() -> None:
    """Without the check the second node is never run, and the request finishes without an answer."""
    walk = Sequential(
        GraphNode(FIRST, ("tokens",), (GraphEdge("middle", SECOND),)), GraphNode(SECOND, ("middle",), flawed.EDGE)
    )
    part = Partition(name="main", program=flawed.program, walks={"speak": walk})
    outcomes = served(replace(flawed.GOOD, nodes=(FIRST, SECOND), partitions=(part,), model=f"{HERE}:TwoNodes"))
    for outcome in outcomes:
        assert outcome.status == "failed" and "node first returned no 'middle'" in outcome.cause
        assert "return 'midle' as 'middle'" in outcome.cause


FIRST = NodeSpec(name="first", engine=STATELESS, ports={"tokens": "i64[n]", "middle": "i64[n]"}, batch_key=("tokens",))
SECOND = NodeSpec(name="second", engine=STATELESS, ports={"middle": "i64[n]", "pcm": "i16[samples]"})


class Half(nn.Module):
    def forward(self, tokens: Tensor | None = None, middle: Tensor | None = None) -> dict[str, Any]:
        return {"midle": tokens} if middle is None else {"pcm": middle.to(torch.int16)}


class TwoNodes(flawed.Model):
    kind = Half


def mistyped(request: ProgramRequest) -> ProgramGenerator:
    tokens = request.inputs["tokens"]
    yield Run("speak", tokns=tokens) if tokens.shape == (BAD,) else Run("speak", tokens=tokens)


def test_a_run_with_a_mistyped_input_fails_its_request_alone() -> None:
    part = replace(flawed.GOOD.partitions[0], program=mistyped)
    good, bad, other = served(replace(flawed.GOOD, partitions=(part,)))
    assert bad.status == "failed" and "gives input 'tokns'; did you mean 'tokens'?" in bad.cause
    assert {good.status, other.status} == {"finished"}
