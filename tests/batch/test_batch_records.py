from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicpm_cli.batch.keys import HashSet, id_key, key_hash, repeated, row_seed
from minicpm_cli.batch.lines import Line, read_lines
from minicpm_cli.batch.logprobs import TokenTexts
from minicpm_cli.batch.output import Answer, answer_row, encode, error_row
from minicpm_cli.batch.records import CODES, Row, Style, parse
from minicpm_cli.types import Event, Logprob, Message, Usage


def parsed(line: Any, **style: Any) -> Row:
    data = line if isinstance(line, bytes) else json.dumps(line).encode()
    return parse(Line(5, 100, data), Style(**style))


def code(line: Any, **style: Any) -> str | None:
    row = parsed(line, **style)
    return row.error and row.error.code


def chat(**body: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | body
    return {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}


def test_lines_end_at_newline_bytes_only() -> None:
    data = '{"a":"x\u2028y\u2029z\x85"}\r\n\n  \t\r\n\ufeff{"b":1}\nlast'.encode()
    lines = list(read_lines(io.BytesIO(b"\xef\xbb\xbf" + data)))
    assert [line.number for line in lines] == [1, 4, 5]
    assert [line.data.decode() for line in lines] == ['{"a":"x\u2028y\u2029z\x85"}', '{"b":1}', "last"]
    for line in lines:
        assert (b"\xef\xbb\xbf" + data)[line.offset :].startswith(line.data)


def test_blank_lines_are_no_rows() -> None:
    assert not list(read_lines(io.BytesIO(b"\n \t\n\r\n\xef\xbb\xbf\n\xef\xbb\xbf  \r\n")))


def test_limit_is_a_snapshot() -> None:
    assert [x.data for x in read_lines(io.BytesIO(b"one\ntwo\nthree\n"), 8)] == [b"one", b"two"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"{bad", "invalid_json"),
        (b"[1,2]", "not_an_object"),
        (b"null", "not_an_object"),
        (b'"x"', "not_an_object"),
        (b"true", "not_an_object"),
        (b"1e5", "not_an_object"),
        (b'{"prompt": "a"} {"prompt": "b"}', "invalid_json"),
        (b'{"prompt": "\xff"}', "invalid_json"),
        (b'{"prompt": "a", "temperature": NaN}', "invalid_json"),
        (b'{"prompt": "a", "temperature": -Infinity}', "invalid_json"),
        (b'{"prompt": "a", "temperature": 1e999}', "invalid_json"),
        (b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}", "bad_parameter"),
        (b'{"prompt": "a", "temperature": 1' + b"0" * 5000 + b"}", "invalid_json"),
        (b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json"),
        (b'{"prompt": "a", "x": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}", "invalid_json"),
        (b'{"prompt": "\\ud800"}', "bad_parameter"),
        ({}, "missing_prompt"),
        ({"prompt": None}, "missing_prompt"),
        ({"prompt": ""}, "missing_prompt"),
        ({"prompt": 5}, "bad_parameter"),
        ({"messages": []}, "missing_prompt"),
        ({"messages": "hi"}, "bad_parameter"),
        ({"messages": ["hi"]}, "bad_parameter"),
        ({"messages": [{"role": "user", "content": None}]}, "missing_prompt"),
        ({"messages": [{"role": "king", "content": "x"}]}, "bad_role"),
        ({"messages": [{"content": "x"}]}, "bad_role"),
        ({"messages": [{"role": [], "content": "x"}]}, "bad_role"),
        ({"messages": [{"role": "user", "content": 5}]}, "bad_parameter"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "bad_parameter"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "bad_parameter"),
        ({"prompt": "a", "messages": []}, "bad_parameter"),
        ({"prompt": "a", "temperature": -1}, "bad_parameter"),
        ({"prompt": "a", "temperature": "hot"}, "bad_parameter"),
        ({"prompt": "a", "max_tokens": 0}, "bad_parameter"),
        ({"prompt": "a", "stop": ["\ud800"]}, "bad_parameter"),
        ({"prompt": "a", "id": True}, "bad_parameter"),
        ({"prompt": "a", "id": ["x"]}, "bad_parameter"),
        ({"prompt": "a", "system": 1}, "bad_parameter"),
        ({"system": "s", "messages": [{"role": "system", "content": "x"}]}, "bad_parameter"),
        ({"custom_id": "a"}, "missing_prompt"),
        (chat(n=2), "bad_parameter"),
        (chat(tools=[{"type": "function"}]), "bad_parameter"),
        (chat(response_format={"type": "yaml"}), "bad_parameter"),
        (chat(response_format=["json_object"]), "bad_parameter"),
        (chat(response_format={"type": "json_schema"}), "schema_invalid"),
        (chat(response_format={"type": "json_schema", "json_schema": {"schema": "{}"}}), "schema_invalid"),
        (chat(logit_bias={"5": 101}), "bad_parameter"),
        (chat(top_kk=5), "bad_parameter"),
        (chat(logprobs=5), "bad_parameter"),
        (chat(messages=None), "missing_prompt"),
        (chat() | {"url": "/v1/embeddings"}, "bad_parameter"),
        (chat() | {"method": "GET"}, "bad_parameter"),
        ({"custom_id": 1, "url": "/v1/completions", "body": {"prompt": ["a", "b"]}}, "bad_parameter"),
        ({"custom_id": 1, "url": "/v1/completions", "body": {"prompt": [1, 2]}}, "bad_parameter"),
        ({"custom_id": 1, "url": "/v1/completions", "body": {"prompt": "a", "echo": True}}, "bad_parameter"),
    ],
)
def test_bad_lines_have_their_code(line: Any, expected: str) -> None:
    assert code(line) == expected
    data = error_row(parsed(line))
    assert data.count(b"\n") == 1
    assert len(data) < 2000
    json.loads(data)


def test_not_utf8_names_the_byte() -> None:
    error = parsed(b'{"prompt": "a\xffb"}').error
    assert error is not None
    assert "byte 14 of the line, byte 113 of the input" in error.message
    hint = parsed('{"a"}'.encode("utf-16")).error
    assert hint is not None
    assert "UTF-16" in hint.message


def test_simple_lines() -> None:
    row = parsed({"id": "x", "prompt": "hi", "system": "be kind", "temperature": 0, "stop": "a", "more": 1})
    assert row.error is None
    assert row.messages == (Message("system", "be kind"), Message("user", "hi"))
    assert row.given == {"temperature": 0.0, "stop": ("a",)}
    assert parsed({"prompt": "hi"}, raw=True).messages == "hi"
    assert code({"prompt": "hi", "system": "s"}, raw=True) == "bad_parameter"
    assert parsed({"prompt": "hi"}, system="dflt").messages == (Message("system", "dflt"), Message("user", "hi"))
    talk = [{"role": "developer", "content": "d"}, {"role": "user", "content": [{"type": "text", "text": "q"}]}]
    assert parsed({"messages": talk}, system="dflt").messages == (Message("system", "d"), Message("user", "q"))
    assert parsed({"prompt": "hi", "schema": {"type": "object"}}).given == {"schema": '{"type": "object"}'}


def test_openai_lines() -> None:
    row = parsed(chat(max_tokens=5, max_completion_tokens=9, stop=["a"], stream=True, n=1, user="u", top_p=None))
    assert (row.id, row.kind, row.error) == ("a", "chat", None)
    assert row.given == {"max_tokens": 9, "stop": ("a",)}
    assert parsed(chat(logprobs=True, top_logprobs=3)).given == {"logprobs": 3}
    assert parsed(chat(logprobs=False)).given == {}
    assert parsed(chat(min_tokens=3, ignore_eos=True)).given == {"min_tokens": 3, "ignore_eos": True}
    assert parsed({"prompt": "hi", "min_tokens": 3}).given == {"min_tokens": 3}
    assert parsed(chat(chat_template_kwargs={"enable_thinking": False})).given == {"think": False}
    row = parsed({"custom_id": "c", "url": "/v1/completions", "body": {"prompt": ["once"], "logprobs": 2}})
    assert (row.kind, row.messages, row.given) == ("completion", "once", {"logprobs": 2})
    assert parsed({"custom_id": "c", "body": {"prompt": "once"}}).kind == "completion"
    assert parsed({"custom_id": "c", "prompt": "once", "body": "an e-mail"}).kind == "simple"


@pytest.mark.parametrize("id_", ["a", "", "é\u2028", "\ud800", 3, -1, 2**70, 1.5, "x" * 10_000])
def test_ids_keep_their_type(id_: Any) -> None:
    row = parsed({"id": id_, "prompt": "a"})
    assert row.named
    again = json.loads(answer_row(row, Answer(finish="stop"), "m", 1))["id"]
    assert (again, type(again)) == (id_, type(id_))


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ({"type": "text"}, None),
        (None, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"enum": [1]}}}, {"enum": [1]}),
    ],
)
def test_response_formats(form: Any, schema: Any) -> None:
    given = parsed(chat(response_format=form)).given
    assert given == ({} if schema is None else {"schema": json.dumps(schema)})


def test_ids_missing_or_repeated_as_keys() -> None:
    assert parsed({"prompt": "a"}).id == 5
    assert parsed({"prompt": "a", "id": None}).id == 5
    assert parsed(b'{"id": 1, "id": 2, "prompt": "a"}').id == 2
    assert id_key(1) != id_key("1")
    broken = parsed(b"{bad")
    assert (broken.id, broken.named) == (5, False)
    assert broken.key != parsed({"id": 5, "prompt": "a"}).key


def test_unreadable_lines_answer_in_their_files_format() -> None:
    assert parse(Line(1, 0, b"{bad"), Style(), "chat").kind == "chat"
    assert parse(Line(1, 0, b'{"custom_id": "7", "bo'), Style()).kind == "chat"
    row = json.loads(error_row(parsed(chat(n=2))))
    assert row["custom_id"] == "a"
    assert row["response"]["status_code"] == 400
    assert row["error"]["code"] == row["response"]["body"]["error"]["code"] == "bad_parameter"
    assert row["error"]["line"] == 5


def test_rows_are_one_line_for_everybody() -> None:
    text = "a\u2028b\u2029c\x85d\ne\x0b\x0c\x1c\x1d\x1e\r\ud800😀"
    data = encode({"id": 1, "text": text})
    assert len(data.decode().splitlines()) == 1
    assert json.loads(data)["text"] == text
    assert "😀".encode() in data


def test_extra_keys_pass_through() -> None:
    row = parsed({"id": "x", "prompt": "hi", "top_k": 3, "label": {"a": [1, "\u2028"]}}, keep_input=True)
    assert json.loads(answer_row(row, Answer(finish="stop"), "m", 1))["input"] == {"label": {"a": [1, "\u2028"]}}
    row = parsed({"id": "x", "prompt": "", "label": 1}, keep_input=True)
    assert json.loads(error_row(row))["input"] == {"label": 1}


def test_answers() -> None:
    answer = Answer(texts=TokenTexts({4: b"yes", 9: b"\xe4"}.__getitem__))
    for event in (
        Event("1", "hm", "think"),
        Event("1", "yes", logprobs=(Logprob(4, -0.5, ((4, -0.5), (9, float("-inf")))),)),
        Event("1", "!", finish="length", usage=Usage(3, 2, 1)),
    ):
        answer.add(event)
    simple = json.loads(answer_row(parsed({"id": 1, "prompt": "a"}), answer, "m", 11))
    assert simple == {
        "id": 1,
        "text": "yes!",
        "think": "hm",
        "finish_reason": "length",
        "seed": 11,
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1},
        "logprobs": [
            {"token": 4, "text": "yes", "logprob": -0.5, "top": [[4, -0.5, "yes"], [9, -9999.0, "\\xe4"]]},
        ],
    }
    out = json.loads(answer_row(parsed(chat()), answer, "m", 11))
    assert (out["custom_id"], out["error"], out["response"]["status_code"]) == ("a", None, 200)
    body = out["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "yes!", "reasoning_content": "hm"}
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == 5
    yes, part = {"token": "yes", "logprob": -0.5, "bytes": [121, 101, 115]}, {"logprob": -9999.0, "bytes": [0xE4]}
    tops = [yes, part | {"token": "\\xe4"}]
    assert body["choices"][0]["logprobs"] == {"content": [yes | {"top_logprobs": tops}], "refusal": None}
    line = {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "once", "logprobs": 2}}
    found = json.loads(answer_row(parsed(line), answer, "m", 11))["response"]["body"]["choices"][0]["logprobs"]
    assert found == {
        "tokens": ["yes"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"yes": -0.5, "\\xe4": -9999.0}],
        "text_offset": [0],
    }


def test_seeds_and_hash_sets() -> None:
    assert row_seed(1, b"a") == row_seed(1, b"a") < 2**53
    assert len({row_seed(s, k) for s in (0, 1, 2**64 - 1) for k in (b"a", b"b")}) == 6
    members = HashSet(key_hash(b"%d" % i) for i in range(1000))
    for i in range(500, 100_000):
        members.add(key_hash(b"%d" % i))
    assert len(members) == 100_000
    assert all(key_hash(b"%d" % i) in members for i in range(0, 100_000, 97))
    assert key_hash(b"x") not in members
    from array import array

    assert repeated(array("Q", [5, 2**64 - 1, 5, 1, 2**64 - 1])) == {5, 2**64 - 1}
    assert repeated(array("Q")) == set()


_SEEDS = [
    json.dumps({"id": 1, "prompt": "hi", "stop": ["a"], "x": {"y": [1.5, None]}}).encode(),
    json.dumps(chat(max_tokens=3)).encode(),
    b'\xef\xbb\xbf{"messages":[{"role":"user","content":[{"type":"text","text":"\\ud83d\\ude00"}]}]}\r',
]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from(_SEEDS)))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 5))] = draw(st.binary(max_size=4))
    return bytes(data)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.one_of(st.binary(max_size=40), mutated()), max_size=8), st.booleans())
def test_any_bytes_give_one_row_a_line(lines: list[bytes], keep: bool) -> None:
    data = b"\n".join(lines)
    expected = sum(bool(x.strip().removeprefix(b"\xef\xbb\xbf").strip()) for x in data.split(b"\n"))
    read = [parse(line, Style(keep_input=keep)) for line in read_lines(io.BytesIO(data))]
    assert len(read) == expected
    for row in read:
        assert row.error is None or row.error.code in CODES
        out = error_row(row) if row.error else answer_row(row, Answer(finish="stop"), "m", 0)
        assert len(out.decode("utf-8").splitlines()) == 1
        assert json.loads(out)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
_NAMES = ["id", "custom_id", "prompt", "messages", "system", "stop", "seed", "schema", "method", "url", "body"]
_BODY = ["prompt", "messages", "stop", "n", "logprobs", "top_logprobs", "chat_template_kwargs", "tools", "max_tokens"]


@settings(deadline=None, max_examples=300)
@given(
    st.dictionaries(
        st.sampled_from(_NAMES), _JSON | st.dictionaries(st.sampled_from(_BODY), _JSON, max_size=4), max_size=6
    )
)
def test_any_values_give_a_row(obj: dict[str, Any]) -> None:
    row = parsed(obj, keep_input=True)
    out = error_row(row) if row.error else answer_row(row, Answer(finish="stop"), "m", 0)
    assert json.loads(out)
