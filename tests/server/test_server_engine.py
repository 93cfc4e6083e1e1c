"""A real engine behind the server: tiny random weights, and the demo as a program."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from checkpoints import write_checkpoint
from minicpm_cli.hub.files import ModelFiles
from minicpm_cli.llm.llm import LLM
from minicpm_cli.settings import LoadOptions

HELLO = [{"role": "user", "content": "hello world"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "minicpm4-0.5b")


def tiny(folder: Path, **options: Any) -> LLM:
    wanted = {"device": "cpu", "dtype": "fp32", "ctx": 4000, "max_seqs": 2} | options
    return LLM.open(LoadOptions(**wanted), ModelFiles("tiny", folder))


def until(true: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.002)


def test_the_pages_of_a_client_that_goes_away_are_free_after_one_step(serve, folder: Path, monkeypatch) -> None:
    llm = tiny(folder)
    server, engine = serve(llm, names=("tiny",)), llm._engine
    stream = server.client().chat.completions.create(
        model="tiny", messages=HELLO, stream=True, max_tokens=3800, extra_body={"top_k": 1}
    )
    next(stream)
    until(lambda: llm.occupancy.pages_held)
    aborted, abort = [], engine.abort
    monkeypatch.setattr(engine, "abort", lambda ident: (aborted.append(engine.stats.steps), abort(ident)))
    stream.response.close()
    until(lambda: not llm.occupancy.pages_held)
    until(lambda: not engine.scheduler.live)
    assert engine.stats.steps - aborted[0] <= 1
    assert engine.stats.cancelled == 1
    engine.scheduler.pool.check()


def test_an_answer_is_that_of_the_model_itself_however_many_ask_at_once(serve, folder: Path) -> None:
    llm = tiny(folder, max_seqs=4)
    server = serve(llm, names=("tiny",))

    def asked(seed: int) -> tuple[str, int]:
        with server.client() as client:
            answer = client.chat.completions.create(
                model="tiny", messages=HELLO, seed=seed, max_tokens=20, temperature=1.0, logprobs=True, top_logprobs=2
            )
        choice = answer.choices[0]
        assert choice.logprobs is not None
        return str(choice.message.content), len(choice.logprobs.content or ())

    alone = [asked(seed) for seed in range(4)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(asked, [*range(4), *range(4)])) == alone * 2
    assert len(set(alone)) > 1


def test_tokens_and_text_are_those_of_the_tokenizer(serve, folder: Path) -> None:
    server = serve(tiny(folder), names=("tiny",))
    ids = server.post("/tokenize", {"prompt": "hello you", "add_special_tokens": False}).json["tokens"]
    assert server.post("/detokenize", {"tokens": ids}).json["prompt"].strip() == "hello you"
    with_bos = server.post("/tokenize", {"prompt": "hello you"}).json["tokens"]
    assert with_bos[-len(ids) :] == ids
    answered = server.post("/v1/completions", {"prompt": [10**6], "max_tokens": 2})
    assert (answered.status, answered.error["type"]) == (400, "invalid_request_error")


def test_a_schema_is_followed_and_a_bad_one_is_the_clients_fault(serve, folder: Path) -> None:
    server = serve(tiny(folder), names=("tiny",))
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = server.client().chat.completions.create(
        model="tiny", messages=HELLO, response_format=form, max_tokens=200, seed=1
    )
    assert json.loads(str(answer.choices[0].message.content))["n"] in (1, 2)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}
    for stream in (False, True):
        answered = server.chat(response_format=form, stream=stream)
        assert answered.status == 400
        assert "schema" in answered.error["message"]
    for body in ({"prompt": "x", "regex": "("}, {"prompt": [5], "regex": "("}):
        assert server.post("/v1/completions", body).status == 400
    assert server.chat(max_tokens=2).status == 200


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_streams_for_minutes_lose_mix_and_stall_nothing(serve, demo_gguf: Path) -> None:
    """64 clients for 5 minutes. What a stream may say begins with its own number, so that none can pass for another's.

    The texts are not compared with those of one client alone: in another company sums are added up in another order.
    """
    llm = LLM.open(LoadOptions(device="cpu", ctx=256, max_seqs=64), ModelFiles("demo", demo_gguf))
    server, end, gaps = serve(llm, names=("demo",)), time.monotonic() + 300, []

    def asked(client: OpenAI, number: int) -> str:
        messages: Any = [{"role": "user", "content": f"Tell me of the number {number}."}]
        chunks = client.chat.completions.create(
            model="demo", messages=messages, max_tokens=40, stream=True, extra_body={"regex": f"{number}: [a-z ]*"}
        )
        text, finish, before = "", None, time.monotonic()
        for chunk in chunks:
            text, finish = text + (chunk.choices[0].delta.content or ""), chunk.choices[0].finish_reason
            gaps.append(time.monotonic() - before)
            before += gaps[-1]
        assert finish in ("stop", "length")
        return text

    def worker(number: int) -> int:
        done = 0
        with server.client() as client:
            while time.monotonic() < end:
                done += 1
                said = asked(client, 1000 * number + done)
                assert re.fullmatch(f"{1000 * number + done}: [a-z ]*", said), said
        return done

    with ThreadPoolExecutor(64) as pool:
        assert min(pool.map(worker, range(64))) >= 2
    assert max(gaps) < 20
    until(lambda: not llm.occupancy.pages_held)
    llm._engine.scheduler.pool.check()


# ---- the demo, as a program ---------------------------------------------------------------------------------------


@contextmanager
def program(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`minicpm serve ARGUMENTS` on a free port, and where it says that it listens."""
    command = [sys.executable, "-m", "minicpm_cli", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    try:
        found = next(found for line in process.stderr if (found := re.search(r"(http://\S+/v1)", line)))
        yield process, found[1]
    finally:
        process.kill()
        process.wait(10)
        process.stderr.close()


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_the_demo_is_served_as_people_call_it(demo_gguf: Path) -> None:
    """The command line known from other servers; a stream is finished after SIGTERM."""
    arguments = ("--model-path", str(demo_gguf), "--chat-template", "chatml", "--trust-remote-code", "--ctx", "512")
    with program(*arguments) as (process, url), OpenAI(base_url=url, api_key="x", max_retries=0) as client:
        name = client.models.list().data[0].id
        asked: Any = [{"role": "user", "content": "What is the capital of France?"}]
        answer = client.chat.completions.create(model=name, messages=asked, temperature=0, max_tokens=40)
        assert "Paris" in str(answer.choices[0].message.content)
        place = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
        tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": place}}]
        called = client.chat.completions.create(
            model=name, messages=asked, tools=tools, tool_choice="required", temperature=0, max_tokens=60
        ).choices[0]
        assert called.message.tool_calls is not None
        assert "city" in json.loads(called.message.tool_calls[0].function.arguments)
        stream = client.chat.completions.create(model=name, messages=asked, temperature=0, max_tokens=40, stream=True)
        text = next(stream).choices[0].delta.content or ""
        process.send_signal(signal.SIGTERM)
        text += "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text == answer.choices[0].message.content
        assert process.wait(20) == 0
