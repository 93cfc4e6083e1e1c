"""Requests made up from our own OpenAPI document: none of them finds a 500, and every answer is one that it names."""

from __future__ import annotations

from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi import checks

from fakes import FakeLLM
from minicpm_cli.hub.files import ModelFiles
from minicpm_cli.settings import LoadOptions

CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)


@pytest.fixture(scope="module")
def server(serve_once):
    return serve_once(FakeLLM(context=1000))


def fuzz(server, examples: int) -> int:
    """Returns how many requests were made."""
    schema, made = schemathesis.openapi.from_url(f"{server.url}/openapi.json"), 0
    for found in schema.get_all_operations():
        for mode in MODES:
            made += _fuzz(found.ok(), mode, examples)
    return made


def _fuzz(operation, mode: schemathesis.GenerationMode, examples: int) -> int:
    made = 0

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def check(case) -> None:
        nonlocal made
        made += 1
        case.call_and_validate(checks=CHECKS)

    if mode is schemathesis.GenerationMode.POSITIVE or operation.body:
        check()
    return made


def test_made_up_requests_find_no_500(server) -> None:
    assert fuzz(server, examples=3) > 20
    assert server.chat().status == 200


@pytest.mark.slow
def test_many_made_up_requests_find_no_500(server) -> None:
    assert fuzz(server, examples=100) > 800
    assert server.chat().status == 200


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_made_up_requests_find_no_500_of_the_demo_either(serve, demo_gguf: Path) -> None:
    """Tokenizer, template, grammars and engine are real here: 80 s on 2 cores."""
    from minicpm_cli.llm.llm import LLM

    llm = LLM.open(LoadOptions(device="cpu", ctx=256, max_seqs=4), ModelFiles("demo", demo_gguf))
    server = serve(llm, names=("demo",))
    assert fuzz(server, examples=60) > 500
    assert server.chat(max_tokens=3).status == 200
    llm._engine.scheduler.pool.check()
