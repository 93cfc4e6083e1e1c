"""Tools in prompts: the ids of transformers' apply_chat_template, and no control token out of what a client says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_template import hostile
from tiny_tokenizers import CHATML, MINICPM5

from minicpm_cli.errors import RequestError
from minicpm_cli.text.template import ChatTemplate, build_prompt, load_template, prompt_ids
from minicpm_cli.text.tokenizer import Tokenizer, load_tokenizer
from minicpm_cli.text.tools import tool_calls_of, tools_of
from minicpm_cli.text.tools_hermes import Hermes
from minicpm_cli.text.tools_minicpm3 import MiniCPM3
from minicpm_cli.text.tools_minicpm5 import MiniCPM5
from minicpm_cli.types import Message, Tool
from tool_templates import HERMES_TOOLS, MINICPM3_TOOLS, MINICPM5_TOOLS

TEMPLATES = {"minicpm3": MINICPM3_TOOLS, "minicpm5": MINICPM5_TOOLS, "hermes": HERMES_TOOLS}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "name_of",
            "description": "Says <b>what</b> a thing is called, for n > 1.\nNot for <people>.",
            "parameters": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "description": "name or number"},
                    "function": {"type": ["number", "null"], "default": 3},
                    "thought": {"type": "string", "enum": ["a", "o", "<x>"]},
                    "deep": {"type": "object", "properties": {"m": {"type": "array", "items": {"type": "object"}}}},
                    "list": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["name"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}},
]
ARGUMENTS = {"name": "a < b\n世", "function": 2.5, "thought": None, "deep": {"m": [{"n": True}]}, "list": []}


def history() -> list[dict[str, Any]]:
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "name_of", "arguments": ARGUMENTS}},
        {"id": "c2", "type": "function", "function": {"name": "now", "arguments": {}}},
    ]
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": '{"n": "<3"}', "tool_call_id": "c1"},
        {"role": "tool", "content": "noon", "tool_call_id": "c2"},
    ]


def as_messages(chat: list[dict[str, Any]]) -> list[Message]:
    return [
        Message(
            turn["role"],
            turn["content"],
            tool_calls=tool_calls_of(turn.get("tool_calls"), "m"),
            tool_call_id=turn.get("tool_call_id"),
        )
        for turn in chat
    ]


class TestLikeTransformers:
    @pytest.mark.parametrize("turns", [2, 3, 5])
    @pytest.mark.parametrize("how", TEMPLATES)
    def test_ids(self, minicpm5: Path, how: str, turns: int) -> None:
        from transformers import AutoTokenizer

        reference = AutoTokenizer.from_pretrained(minicpm5)
        reference.chat_template = TEMPLATES[how]
        chat = history()[:turns]
        expected = reference.apply_chat_template(
            chat, tools=TOOLS, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        tokenizer = load_tokenizer(minicpm5)
        template = ChatTemplate(TEMPLATES[how], tokenizer)
        ids = prompt_ids(tokenizer, template, as_messages(chat), tools=tools_of(TOOLS))
        assert ids == (expected if how == "minicpm5" else [0, *expected])

    def test_arguments_as_the_text_that_some_templates_want(self, byte: Tokenizer) -> None:
        source = (
            "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name + ' ' + c.function.arguments }}"
            "{% endfor %}{% endfor %}{{ tools }}"
        )
        template = ChatTemplate(source, byte)
        assert f"name_of {json.dumps(ARGUMENTS, ensure_ascii=False)}" in template.render(as_messages(history())).plain
        printed = ChatTemplate(source.replace("c.function.name + ' ' + ", ""), byte)
        assert json.dumps(ARGUMENTS, ensure_ascii=False) in printed.render(as_messages(history())).plain

    def test_thoughts_have_the_name_that_minicpm3_knows(self, byte: Tokenizer) -> None:
        template = ChatTemplate(MINICPM3_TOOLS, byte)
        text = template.render([Message("user", "q"), Message("assistant", "a", "hm")]).plain
        assert "<|thought_start|>\nhm\n<|thought_end|>\na" in text


class TestFormats:
    @pytest.mark.parametrize(
        ("source", "kind"), [(MINICPM3_TOOLS, MiniCPM3), (MINICPM5_TOOLS, MiniCPM5), (HERMES_TOOLS, Hermes)]
    )
    def test_told_by_the_template(self, byte: Tokenizer, source: str, kind: type) -> None:
        assert isinstance(ChatTemplate(source, byte).tool_format, kind)

    @pytest.mark.parametrize(
        "source",
        [
            CHATML,
            MINICPM5,
            "{% if tools is none %}<tool_call>{% endif %}",
            "{{ tools }}",
            "{{ raise_exception('no') }}{{ tools }}<tool_call>",
        ],
    )
    def test_none(self, byte: Tokenizer, source: str) -> None:
        assert ChatTemplate(source, byte).tool_format is None


def tool_with(text: str) -> tuple[Tool, ...]:
    schema = {
        "type": "object",
        "title": text,
        "properties": {text: {"type": "string", "description": text, "enum": [text]}},
        "required": [text],
        f"x{text}": text,
    }
    return tools_of(
        [{"type": "function", "function": {"name": "f", "description": text, "parameters": schema, f"x{text}": [text]}}]
    )


class TestNoControlTokens:
    @pytest.mark.parametrize("how", TEMPLATES)
    @given(text=hostile | st.text(max_size=4))
    def test_of_what_a_client_says(self, byte: Tokenizer, how: str, text: str) -> None:
        template = ChatTemplate(TEMPLATES[how], byte)

        def controls(inner: str) -> list[int]:
            calls = tool_calls_of(
                [{"id": inner or "c", "function": {"name": inner or "f", "arguments": {inner: [inner, {inner: 1}]}}}],
                "m",
            )
            messages = [
                Message("user", "q"),
                Message("assistant", inner, tool_calls=calls),
                Message("tool", inner, tool_call_id=inner),
            ]
            prompt = build_prompt(byte, template, messages, tools=tool_with(inner))
            return [ident for ident in prompt.ids if ident in byte.control_ids]

        assert controls(text) == controls("x" if text else "")

    def test_a_tool_called_as_a_token_is_spelled(self, byte: Tokenizer) -> None:
        template = ChatTemplate("{% for t in tools or [] %}{{ '<' ~ t.function.name ~ '>' }}{% endfor %}", byte)
        tools = tools_of([{"type": "function", "function": {"name": "think"}}])
        ids = prompt_ids(byte, template, [Message("user", "q")], tools=tools)
        assert set(ids) & byte.control_ids == {0}
        assert byte.decode(ids) == "<s><think>"


class TestBegun:
    def test_what_the_answer_begins_with_is_control_tokens_behind_the_thought(self, byte: Tokenizer) -> None:
        template = ChatTemplate(MINICPM5, byte)
        prompt = build_prompt(byte, template, [Message("user", "<think>")], begun='<function name="f">')
        assert prompt.channel == "answer"
        assert byte.decode(prompt.ids).endswith('<think>\n\n</think>\n\n<function name="f">')
        assert byte.control_text["<function"] in prompt.ids


class TestChatML:
    """The built-in one."""

    def test_without_tools_it_is_nothing_but_the_turns(self, minicpm5: Path, byte: Tokenizer) -> None:
        messages = [Message("system", " s\n"), Message("user", "q"), Message("assistant", "a"), Message("tool", "r")]
        built_in = load_template(minicpm5, "chatml", byte).render(messages).plain
        assert built_in == ChatTemplate(CHATML, byte).render(messages).plain

    def test_with_tools(self, minicpm5: Path, byte: Tokenizer) -> None:
        template = load_template(minicpm5, "chatml", byte)
        assert isinstance(template.tool_format, Hermes)
        text = template.render(as_messages(history()), tools=tools_of(TOOLS)).plain
        assert text.count("<|im_start|>system\n") == 1
        for tool in TOOLS:
            assert json.dumps(tool, ensure_ascii=False) + "\n" in text
        arguments = json.dumps(ARGUMENTS, ensure_ascii=False)
        assert f'<tool_call>\n{{"name": "name_of", "arguments": {arguments}}}\n</tool_call>\n<tool_call>' in text
        assert "<|im_start|>user\n<tool_response>\nnoon\n</tool_response><|im_end|>\n" in text


@pytest.mark.parametrize("arguments", ["{", "nonsense"])
def test_arguments_that_are_no_json_are_refused(byte: Tokenizer, arguments: str) -> None:
    from minicpm_cli.types import ToolCall

    template = ChatTemplate(HERMES_TOOLS, byte)
    with pytest.raises(RequestError, match="'c1' are no JSON"):
        template.render([Message("assistant", "", tool_calls=(ToolCall("c1", "f", arguments),))])
