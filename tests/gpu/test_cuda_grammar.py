"""Structured output on a GPU: steps with and without masks, captured and not; every answer is what it was asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from checkpoints import write_checkpoint
from minicpm_cli.hub.files import ModelFiles
from minicpm_cli.llm.llm import LLM
from minicpm_cli.settings import LoadOptions
from minicpm_cli.types import Message, Request, SamplingParams
from structured import SCHEMA, answered

pytestmark = pytest.mark.gpu
KINDS: list[dict[str, Any]] = [
    {"schema": json.dumps(SCHEMA), "temperature": 1.5},
    {"regex": "[a-f0-9]{8}", "temperature": 0.0},
    {"max_tokens": 25},
    {"schema": json.dumps(SCHEMA), "repetition_penalty": 1.2, "top_k": 30, "top_p": 0.9},
    {"schema": json.dumps(SCHEMA), "logprobs": 1},
]


def requests(count: int) -> list[Request]:
    return [
        Request(
            str(n),
            (Message("user", "hello " * (n % 7) + "world"),),
            SamplingParams().checked({"max_tokens": 150, "seed": n} | KINDS[n % len(KINDS)]),
        )
        for n in range(count)
    ]


@pytest.mark.parametrize("graphs", [True, False])
def test_masked_and_free_rows_share_steps(tmp_path: Path, graphs: bool) -> None:
    folder = write_checkpoint(tmp_path / "m", "minicpm4-0.5b")
    options = LoadOptions(device="cuda", dtype="fp32", ctx=256, max_seqs=16, graphs=graphs)
    llm = LLM.open(options, ModelFiles("tiny", folder))
    asked = requests(40)
    said = answered(llm, asked)
    for request in asked:
        text, event = said[request.id]
        assert event.error is None
        if request.params.schema:
            assert (event.finish, event.incomplete) == ("stop", False)
            assert jsonschema_rs.is_valid(SCHEMA, json.loads(text)), text
        elif request.params.regex:
            assert re.fullmatch("[a-f0-9]{8}", text), text
    free = [request for request in asked if not request.params.schema and not request.params.regex]
    alone = answered(llm, free)
    assert {r.id: said[r.id][0] for r in free} == {r.id: alone[r.id][0] for r in free}
    llm.close()
