"""The official client over real HTTP: what its users write runs unchanged."""

from __future__ import annotations

import openai
import pytest

from fakes import FakeLLM
from minicpm_cli.llm.remote import RemoteLLM
from minicpm_cli.types import Message, Request, SamplingParams

ASKED = [{"role": "user", "content": "one two three"}]
SAID = "You said: one two three"


def test_a_chat_is_answered_with_the_counts(serve) -> None:
    answer = serve().client().chat.completions.create(model="fake", messages=ASKED)
    assert answer.choices[0].message.content == SAID
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.object, answer.model) == ("chat.completion", "fake")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5


def test_a_stream_is_the_same_text_in_pieces_and_tells_the_counts_at_its_end(serve) -> None:
    client = serve(FakeLLM(delay=0.01)).client()
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(model="fake", messages=ASKED, stream=True, stream_options=options))
    *pieces, last = chunks
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in pieces) == SAID
    assert len([c for c in pieces if c.choices[0].delta.content]) > 1
    assert [c.choices[0].finish_reason for c in pieces[-2:]] == [None, "stop"]
    assert last.choices == []
    assert last.usage.completion_tokens == 5
    assert len({c.id for c in chunks}) == 1


def test_without_the_option_no_chunk_has_counts(serve) -> None:
    chunks = list(serve().client().chat.completions.create(model="fake", messages=ASKED, stream=True))
    assert all(c.usage is None and c.choices for c in chunks)


def test_thinking_is_apart_from_the_answer(serve) -> None:
    client = serve(FakeLLM(thought=lambda request: "let me see")).client()
    message = client.chat.completions.create(model="fake", messages=ASKED).choices[0].message
    assert (message.content, message.reasoning_content) == (SAID, "let me see")
    deltas = [c.choices[0].delta for c in client.chat.completions.create(model="fake", messages=ASKED, stream=True)]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "let me see"
    assert "".join(d.content or "" for d in deltas) == SAID


def test_biases_are_passed_on(serve) -> None:
    server = serve()
    server.client().chat.completions.create(model="fake", messages=ASKED, logit_bias={"9": 1, "5": -100})
    assert server.llm.seen[-1].params.logit_bias == ((5, -100.0), (9, 1.0))
    llm = RemoteLLM.open(server.url, None, None, {})
    params = SamplingParams(logit_bias=((5, -1.5),))
    list(llm.stream([Request("a", (Message("user", "q"),), params)]))
    assert server.llm.seen[-1].params.logit_bias == params.logit_bias


def test_an_answer_may_go_on_where_it_would_end(serve) -> None:
    server = serve()
    server.client().chat.completions.create(model="fake", messages=ASKED, extra_body={"ignore_eos": True})
    assert server.llm.seen[-1].params.ignore_eos
    llm = RemoteLLM.open(server.url, None, None, {})
    for asked in (True, False):
        list(llm.stream([Request("a", (Message("user", "q"),), SamplingParams(ignore_eos=asked))]))
        assert server.llm.seen[-1].params.ignore_eos is asked


def test_an_answer_may_have_to_be_of_some_length(serve) -> None:
    server = serve()
    server.client().chat.completions.create(model="fake", messages=ASKED, extra_body={"min_tokens": 7})
    assert server.llm.seen[-1].params.min_tokens == 7
    server.client().responses.create(model="fake", input="q", extra_body={"min_tokens": 8})
    assert server.llm.seen[-1].params.min_tokens == 8
    llm = RemoteLLM.open(server.url, None, None, {})
    for asked in (9, 0):
        list(llm.stream([Request("a", (Message("user", "q"),), SamplingParams(min_tokens=asked))]))
        assert server.llm.seen[-1].params.min_tokens == asked


def test_several_choices_have_their_own_seeds_and_places(serve) -> None:
    server = serve(FakeLLM(answer=lambda request: f"seed {request.params.seed}"))
    answer = server.client().chat.completions.create(model="fake", messages=ASKED, n=3, seed=5)
    assert [(c.index, c.message.content) for c in answer.choices] == [(0, "seed 5"), (1, "seed 6"), (2, "seed 7")]
    assert answer.usage.completion_tokens == 6
    once = server.client().chat.completions.create(model="fake", messages=ASKED, seed=5)
    assert answer.usage.prompt_tokens == once.usage.prompt_tokens
    texts = ["", "", ""]
    for chunk in server.client().chat.completions.create(model="fake", messages=ASKED, n=3, seed=5, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["seed 5", "seed 6", "seed 7"]


def test_all_sampling_values_reach_the_model(serve) -> None:
    server = serve()
    server.client().chat.completions.create(
        model="fake",
        messages=ASKED,
        temperature=0.25,
        top_p=0.5,
        presence_penalty=1,
        frequency_penalty=-1,
        max_completion_tokens=3,
        stop=["x", "y"],
        seed=-1,
        extra_body={
            "min_p": 0.1,
            "top_k": 7,
            "repetition_penalty": 1.1,
            "chat_template_kwargs": {"enable_thinking": False},
            "think_budget": 9,
        },
    )
    params = server.llm.seen[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.25, 0.5, 7, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1.0, -1.0, 1.1)
    assert (params.max_tokens, params.stop, params.think, params.think_budget) == (3, ("x", "y"), False, 9)
    assert params.seed == 2**64 - 1


def test_a_cut_answer_says_so(serve) -> None:
    answer = serve().client().chat.completions.create(model="fake", messages=ASKED, max_tokens=2)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("You said:", "length")


def test_text_parts_and_the_developer_are_understood(serve) -> None:
    server = serve()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    told = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    server.client().chat.completions.create(model="fake", messages=told)
    assert [(m.role, m.content) for m in server.llm.seen[0].messages] == [
        ("system", "Be brief."),
        ("user", "one\ntwo"),
    ]


def test_completions_of_several_prompts_come_in_their_order(serve) -> None:
    client = serve().client()
    answer = client.completions.create(model="fake", prompt=["one", "two"], n=2, max_tokens=9)
    assert [c.text for c in answer.choices] == ["You said: one"] * 2 + ["You said: two"] * 2
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    streamed = {0: "", 1: ""}
    for chunk in client.completions.create(model="fake", prompt=["one", "two"], stream=True, echo=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == {0: "oneYou said: one", 1: "twoYou said: two"}


def test_a_completion_that_does_not_say_is_as_long_as_openai_makes_it(serve) -> None:
    answer = serve(FakeLLM(answer=lambda r: "word " * 50)).client().completions.create(model="fake", prompt="x")
    assert answer.usage.completion_tokens == 16


def test_tokens_are_a_prompt(serve) -> None:
    server = serve()
    server.client().completions.create(model="fake", prompt=[[5, 6], [7]])
    assert sorted(list(request.ids) for request in server.llm.seen) == [[5, 6], [7]]


def test_models_are_listed_by_each_of_their_names(serve) -> None:
    client = serve(names=("fake", "other/name")).client()
    assert [m.id for m in client.models.list()] == ["fake", "other/name"]
    assert client.models.retrieve("other/name").id == "other/name"
    assert client.chat.completions.create(model="other/name", messages=ASKED).model == "fake"


def test_a_model_that_is_not_there_is_not_found(serve) -> None:
    client = serve().client()
    with pytest.raises(openai.NotFoundError, match="`gpt-9` does not exist") as caught:
        client.chat.completions.create(model="gpt-9", messages=ASKED)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_there_are_no_embeddings(serve) -> None:
    with pytest.raises(openai.NotFoundError, match="makes no embeddings"):
        serve().client().embeddings.create(model="fake", input="x")


def test_a_failure_in_the_middle_of_a_stream_reaches_the_client_as_an_error(serve) -> None:
    class Breaking(FakeLLM):
        def stream(self, requests):
            yield from self.broken(super().stream(requests))

        def broken(self, events):
            for count, event in enumerate(events):
                if count == 2:
                    raise RuntimeError("a defect")
                yield event

    server = serve(Breaking(delay=0.01))
    with pytest.raises(openai.APIError, match="failed on this request"):
        list(server.client().chat.completions.create(model="fake", messages=ASKED, stream=True))


def test_any_object_may_be_asked_for(serve) -> None:
    server = serve()
    client = server.client()
    client.chat.completions.create(model="fake", messages=ASKED, response_format={"type": "json_object"})
    client.responses.create(model="fake", input="one", text={"format": {"type": "json_object"}})
    assert [asked.params.schema for asked in server.llm.seen] == ['{"type": "object"}'] * 2


def test_a_schema_that_is_missing_is_refused_by_its_place(serve) -> None:
    with pytest.raises(openai.BadRequestError, match=r"response_format.json_schema.schema is missing") as caught:
        serve().client().chat.completions.create(
            model="fake", messages=ASKED, response_format={"type": "json_schema", "json_schema": {"name": "x"}}
        )
    assert caught.value.param == "response_format.json_schema"
