"""What a server says of itself: metrics, health, tokens, and the shapes of log-probabilities."""

from __future__ import annotations

import re

from fakes import FakeLLM
from minicpm_cli.server.metrics import Histogram
from minicpm_cli.server.shapes import ChatShape, CompletionShape, Head
from minicpm_cli.types import Event, Logprob

_LINE = re.compile(r'[a-z_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? [0-9.e+-]+')
HEAD = Head("id", 5, "model")
PIECES = {1: b"a", 2: "é".encode(), 3: b"\xc3"}


def test_metrics_are_text_that_prometheus_reads_and_counts_move(serve) -> None:
    server = serve(FakeLLM(thought=lambda request: "hm"))
    for _ in range(2):
        server.chat()
    server.chat(temperature="x")
    server.call("GET", "/elsewhere/5")
    answered = server.call("GET", "/metrics")
    assert answered.headers["content-type"].startswith("text/plain")
    lines = answered.body.decode().splitlines()
    assert all(_LINE.fullmatch(line) for line in lines if not line.startswith("#"))
    named = {line.split(" ")[2] for line in lines if line.startswith("# TYPE")}
    assert {line.split("{")[0].split(" ")[0] for line in lines if line[0] != "#"} <= {
        name + end for name in named for end in ("", "_bucket", "_sum", "_count")
    }
    values = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
    assert values['minicpm_requests_finished_total{reason="stop"}'] == "2"
    assert values["minicpm_time_to_first_token_seconds_count"] == "2"
    assert values["minicpm_time_per_output_token_seconds_count"] == "2"
    assert values["minicpm_generated_tokens_total"] == "8"
    assert values['minicpm_http_responses_total{path="/v1/chat/completions",status="400"}'] == "1"
    assert values['minicpm_http_responses_total{path="other",status="404"}'] == "1"
    assert values["minicpm_requests_running"] == "0"


def test_buckets_count_what_is_below_them() -> None:
    histogram = Histogram("h", "About.", (0.1, 1))
    for seconds in (0.05, 0.1, 0.5, 7):
        histogram.observe(seconds)
    assert list(histogram.lines())[2:] == [
        'h_bucket{le="0.1"} 2',
        'h_bucket{le="1"} 3',
        'h_bucket{le="+Inf"} 4',
        "h_sum 7.650000",
        "h_count 4",
    ]


def test_texts_and_conversations_become_tokens_and_text_again(serve) -> None:
    server = serve()
    text = server.post("/tokenize", {"prompt": "one two", "return_token_strs": True}).json
    assert text == {"count": 3, "max_model_len": 4096, "tokens": [0, 1, 2], "token_strs": ["<0>", "<1>", "<2>"]}
    plain = server.post("/tokenize", {"prompt": "one two", "add_special_tokens": False}).json
    assert plain["tokens"] == [0, 1]
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "one"}]}).json
    assert chat["count"] == 2
    assert server.post("/detokenize", {"tokens": [5, 6]}).json == {"prompt": "<5><6>"}


def test_log_probabilities_of_a_chat() -> None:
    shape = ChatShape(HEAD, PIECES.__getitem__, logprobs=True)
    chunk = shape.piece(0, Event("a", "é", logprobs=(Logprob(2, -0.5, ((2, -0.5), (3, float("-inf")))),)))
    assert chunk is not None
    assert chunk["choices"][0]["logprobs"]["content"] == [
        {
            "token": "é",
            "logprob": -0.5,
            "bytes": [0xC3, 0xA9],
            "top_logprobs": [
                {"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9]},
                {"token": "\\xc3", "logprob": -9999.0, "bytes": [0xC3]},
            ],
        }
    ]


def test_log_probabilities_of_a_completion_know_their_place_across_pieces() -> None:
    shape = CompletionShape(HEAD, PIECES.__getitem__, logprobs=True, echoed=("ab",))
    first = shape.piece(0, Event("a", "a", logprobs=(Logprob(1, -1.0, ((1, -1.0),)),)))
    second = shape.piece(0, Event("a", "é", logprobs=(Logprob(2, -2.0, ()),)))
    assert first is not None
    assert second is not None
    assert first["choices"][0]["logprobs"] == {
        "tokens": ["a"],
        "token_logprobs": [-1.0],
        "top_logprobs": [{"a": -1.0}],
        "text_offset": [2],
    }
    assert second["choices"][0]["logprobs"]["text_offset"] == [3]
