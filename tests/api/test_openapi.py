"""/openapi.json and /docs match the routes, parameters and responses; hostile requests generated from them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from mstar_core.api.openapi import describe
from mstar_core.api.parse.params import SILENT
from mstar_core.api.route_table import ROUTES
from mstar_core.config.deployment import DeploymentSpec, Plan
from mstar_core.plugin.params import COMMON_NAMES
from tests.api.conftest import Started
from tests.api.live import LiveApi, live_api
from tests.fakes.conductor import echo
from tests.fakes.omni_model import SPEC, TEXT_ONLY

DEPLOYMENT = DeploymentSpec(
    name="fake", model="fake_omni", plugin="fake", run_dir="", log_dir="", plan=Plan(ranks=(), placements=())
)
SERVED = [route for route in ROUTES if not route.needs or SPEC.routes.intersection(route.needs)]
DOCUMENT = describe(DEPLOYMENT, SPEC, SERVED)
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS = {found.ok().label: found.ok() for found in SCHEMA.get_all_operations()}


def no_crash(ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case) -> None:
    """Check for server errors, except for requests with an impossible deadline."""
    assert response.status_code < 500 or response.status_code == 504, response.text


CHECKS = (no_crash, status_code_conformance, content_type_conformance, response_schema_conformance)
EXAMPLES = int(os.environ.get("MSTAR_EXAMPLES", "20"))
"""Requests of each kind to each route; use MSTAR_EXAMPLES=1000 for a nightly run."""


@st.composite
def supported(draw: st.DrawFn, requests: st.SearchStrategy[schemathesis.Case]) -> schemathesis.Case:
    """Draw a request. Reject it if the generator raises its own error about an uploaded file.

    schemathesis 4.32 filters some negative bodies with a JSON validator that raises for the bytes of a file. Which
    examples meet this depends on their number (`MSTAR_EXAMPLES`) and seed.
    """
    try:
        return draw(requests)
    except ValueError as error:
        if str(error) != "Unsupported type: 'Binary'":
            raise
        reject()


@pytest.fixture(scope="module")
def server() -> Iterator[LiveApi]:
    with live_api(echo, SPEC, timeout_s=20.0) as live:
        yield live
        live.assert_good()


CASES = [(label, GenerationMode.POSITIVE) for label in sorted(OPERATIONS)]
CASES += [(label, GenerationMode.NEGATIVE) for label in sorted(OPERATIONS) if OPERATIONS[label].body.items]


@pytest.mark.timeout(300 + 10 * EXAMPLES)
@pytest.mark.filterwarnings("ignore")  # warnings of the generator about inputs it cannot create
@pytest.mark.parametrize("label, mode", CASES, ids=[f"{mode.value} {label}" for label, mode in CASES])
def test_no_request_is_answered_by_a_crash_or_against_the_description(
    label: str, mode: GenerationMode, server: LiveApi
) -> None:
    operation = OPERATIONS[label]

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=supported(operation.as_strategy(generation_mode=mode)))
    def send(case: schemathesis.Case) -> None:
        answer = case.call(base_url=server.url)
        case.validate_response(answer, checks=CHECKS)

    send()


async def test_the_description_holds_what_the_model_maps_and_takes(started: Started) -> None:
    async with started(echo, model=SPEC, api_keys=("k",)) as api:
        headers = {"Authorization": "Bearer k"}
        document = (await api.client.get("/openapi.json", headers=headers)).json()
        assert set(document["paths"]) == set(DOCUMENT["paths"])
        assert (await api.client.get("/openapi.json")).status_code == 401
        for name in ("ChatRequest", "GenerateRequest", "ImageRequest", "SpeechRequest", "TranscriptionRequest"):
            schema = document["components"]["schemas"][name]
            assert {*COMMON_NAMES, *SILENT, "talker_temperature", "think"} <= set(schema["properties"]), name
            assert schema["additionalProperties"] is False
        assert document["paths"]["/generate"]["post"]["security"] == [{"bearer": []}]
        assert "security" not in document["paths"]["/health"]["get"]


@pytest.mark.parametrize(
    ("prefix", "servers"), [("/m/llm%3Amini", [{"url": "/m/llm%3Amini"}]), ("//evil", None), ("x", None)]
)
async def test_the_description_repeats_the_prefix_of_a_proxy(
    started: Started, prefix: str, servers: list[dict[str, str]] | None
) -> None:
    async with started(echo, model=SPEC) as api:
        answer = await api.client.get("/openapi.json", headers={"X-Forwarded-Prefix": prefix})
        assert answer.json().get("servers") == servers


def test_headers_that_set_parameters_are_described_where_routes_have_parameters() -> None:
    described = describe(DEPLOYMENT, SPEC, ROUTES)["paths"]
    headers = {
        path: {each["name"] for each in described[path]["post"]["parameters"] if each["in"] == "header"}
        for path in ("/tokenize", "/detokenize", "/v1/completions")
    }
    assert headers["/tokenize"] == headers["/detokenize"] == {"X-Request-ID"}
    assert {"X-Request-ID", "X-Request-Timeout", "X-Period-Ms"} <= headers["/v1/completions"]


def test_every_part_of_a_path_is_a_parameter() -> None:
    for path, operations in describe(DEPLOYMENT, SPEC, ROUTES)["paths"].items():
        for operation in operations.values():
            described = {each["name"] for each in operation.get("parameters", ()) if each["in"] == "path"}
            assert described == set(re.findall(r"{(\w+)}", path)), path


def test_the_description_refuses_what_the_api_refuses() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    assert schemas["SpeechRequest"]["properties"]["input"]["minLength"] == 1
    turns = {**schemas["ChatRequest"]["properties"]["messages"], "items": {}}

    def fits(messages: list[dict[str, object]]) -> bool:
        return jsonschema_rs.is_valid(turns, messages)

    assert not fits([{"role": "user"}]) and not fits([{"role": "user", "content": []}])
    assert fits([{"role": "assistant"}, {"role": "user", "content": "hello"}])
    assert schemas["ChatRequest"]["properties"]["period_ms"]["minimum"] > 0
    generate = schemas["GenerateRequest"]["properties"]
    assert generate["functions"]["enum"] == [[], None]
    assert all(jsonschema_rs.is_valid(generate[name], None) for name in ("stop", "top_k", "talker_temperature"))


async def test_routes_that_the_model_does_not_map_are_not_described(started: Started) -> None:
    async with started(echo, model=TEXT_ONLY, unknown_params="warn") as api:
        document = (await api.client.get("/openapi.json")).json()
        assert {"/v1/chat/completions", "/generate"} <= set(document["paths"])
        assert not {"/v1/audio/speech", "/v1/images/edits"} & set(document["paths"])
        assert document["components"]["schemas"]["ChatRequest"]["additionalProperties"] is True
