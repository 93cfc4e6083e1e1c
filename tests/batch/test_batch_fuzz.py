"""Whatever an input or an output holds: one row a line, every row found again, no traceback."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from batch_tools import no_model, run
from hypothesis import given, settings
from hypothesis import strategies as st

from minicpm_cli.batch.journal import read_row, recover
from minicpm_cli.batch.keys import key_hash
from minicpm_cli.batch.lines import read_lines
from minicpm_cli.batch.options import BatchOptions
from minicpm_cli.batch.output import Answer, answer_row, error_row
from minicpm_cli.batch.records import CODES, Style, parse, read_keys
from minicpm_cli.batch.run import run_batch
from minicpm_cli.batch.scan import scan_input
from minicpm_cli.errors import FileError, UsageError

_BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stop": ["a"], "n": 1}
_SEEDS = [
    {"id": 1, "prompt": "hi", "stop": ["a"], "x": {"y": [1.5, None]}},
    {"prompt": "世界 \u2028 \x85", "temperature": 0.5, "top_p": 1, "seed": 3, "logprobs": 2},
    {"id": "é", "messages": [{"role": "user", "content": [{"type": "text", "text": "\U0001f600"}]}], "think": False},
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": _BODY},
    {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": ["once"], "logprobs": 2}},
]
_TOKENS = [
    *(b'"', b"{", b"}", b"[", b"]", b":", b",", b"\\", b"null", b"true", b"-", b"1e999", b"NaN", b"\xff", b"\x00"),
    *(b"\n", b"\r", b"\xef\xbb\xbf", b"\\ud800", "\u2028".encode(), b'"id"', b'"custom_id"', b'"body"', b'"prompt"'),
    *(b'"messages"', b'"role"', b'"content"', b'"system"', b'"stop"', b'"max_tokens"', b"9" * 400, b"[" * 3000),
]


def inputs(count: int, seed: int) -> Any:
    """Files of up to three lines: good ones with pieces taken out, doubled, swapped and put in."""
    draw = random.Random(seed)
    good = [json.dumps(s, ensure_ascii=bool(n % 2)).encode() for n, s in enumerate(_SEEDS * 2)]
    for _ in range(count):
        data = bytearray(b"\n".join(draw.choices(good, k=draw.randrange(1, 4))))
        for _ in range(draw.choice((0, 1, 1, 2, 3, 8))):
            at, size = draw.randrange(len(data) + 1), draw.randrange(6)
            kind = draw.randrange(4)
            if kind == 0:
                data[at : at + size] = draw.choice(_TOKENS)
            elif kind == 1:
                data[at : at + size] = draw.randbytes(size)
            elif kind == 2:
                del data[at : at + draw.randrange(30)]
            else:
                data[at:at] = data[draw.randrange(len(data) + 1) :][: draw.randrange(60)]
        yield bytes(data)


def check(data: bytes) -> None:
    expected = sum(bool(x.strip().removeprefix(b"\xef\xbb\xbf").strip()) for x in data.split(b"\n"))
    lines = list(read_lines(io.BytesIO(data)))
    assert len(lines) == expected
    for line in lines:
        row = parse(line, Style(keep_input=True))
        assert row.error is None or (row.error.code in CODES and row.error.message)
        assert row.key in read_keys(line)  # --ordered finds its place
        out = error_row(row) if row.error else answer_row(row, Answer(finish="stop"), "m", 0)
        assert len(out.decode("utf-8").splitlines()) == 1
        found = read_row(out)
        assert found is not None
        assert found[0] in row.keys  # a resume finds it done
        assert (found[1] is None) == (row.error is None)
    try:
        assert scan_input(io.BytesIO(data), Path("in")).rows == expected
    except UsageError as refusal:
        if "more than once" not in str(refusal):
            raise


def test_the_reader_takes_anything() -> None:
    for data in inputs(2500, seed=1):
        check(data)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_reader_takes_anything_a_hundred_thousand_times() -> None:
    for data in inputs(100_000, seed=2):
        check(data)


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=200) | st.integers(0, 2**32).map(lambda seed: next(iter(inputs(1, seed)))), st.booleans())
def test_an_output_of_any_bytes_is_made_whole_or_named(tmp_path_factory: Any, data: bytes, lenient: bool) -> None:
    out = tmp_path_factory.getbasetemp() / "any-output"
    out.write_bytes(data)
    try:
        past = recover(out, drop_errors=False, lenient=lenient)
    except FileError as error:
        if lenient or "is no output row" not in str(error):
            raise
        return
    whole = out.read_bytes()
    assert whole[-1:] in (b"", b"\n")
    assert data.startswith(whole.removesuffix(b"\n")) or whole.startswith(data)
    again = recover(out, drop_errors=False, lenient=lenient)
    assert (again.ok, again.errors, len(again.done)) == (past.ok, past.errors, len(past.done))
    assert out.read_bytes() == whole


_ROWS = st.lists(
    st.tuples(st.sampled_from(["id", "custom_id", None]), st.integers(0, 99) | st.text(max_size=4), st.booleans()),
    max_size=8,
    unique_by=lambda row: json.dumps(row[1]),
)


@settings(deadline=None, max_examples=40)
@given(_ROWS, st.integers(0, 10**6), st.booleans())
def test_a_run_that_was_cut_anywhere_ends_as_one_that_was_not(
    tmp_path_factory: Any, lines: list[tuple[str | None, Any, bool]], cut: int, ordered: bool
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    source, out = folder / "in", folder / "out"
    made = [({name: id_} if name else {}) | ({"prompt": "a b"} if good else {"prompt": 1}) for name, id_, good in lines]
    source.write_text("\n".join(map(json.dumps, made)))
    try:
        run(source, out, ordered=ordered)
    except UsageError as refusal:
        if "more than once" not in str(refusal):
            raise
        return
    whole = out.read_bytes()
    out.write_bytes(whole[: cut % (len(whole) + 1)])
    run(source, out, ordered=ordered)
    assert sorted(out.read_bytes().splitlines()) == sorted(whole.splitlines())
    assert out.read_bytes() == whole or not ordered
    options = BatchOptions(str(source), str(out), seed=7, progress=False, ordered=ordered)
    assert run_batch(no_model, options).skipped == len(made)


@given(st.text(max_size=6) | st.integers() | st.floats(allow_nan=False, allow_infinity=False))
def test_an_id_is_found_again_whatever_it_is(id_: Any) -> None:
    line = next(read_lines(io.BytesIO(json.dumps({"id": id_, "prompt": "a"}).encode())))
    row = parse(line, Style())
    found = read_row(answer_row(row, Answer(finish="stop"), "m", 0))
    assert found == (row.key, None)
    assert key_hash(row.key) == key_hash(read_keys(line)[0])
