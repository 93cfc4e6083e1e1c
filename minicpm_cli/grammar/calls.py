"""The rules of `minicpm_cli.text.tool_rules`, completed for llguidance and a vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from minicpm_cli.errors import RequestError
from minicpm_cli.grammar.element import element_rules
from minicpm_cli.grammar.source import embedded_json, reason, refuse

_LINE = re.compile(r"(\w+): %(json|text|tag|until) (.*)")


def call_grammar(rules: str, control: Mapping[str, int]) -> str:
    """The grammar as llguidance reads it. `control`: ids of control tokens. Raises RequestError(schema_invalid)."""
    from llguidance import LLMatcher

    lark = "\n".join(_completed(line, control) for line in rules.split("\n"))
    grammar: str = LLMatcher.grammar_from_lark(lark)
    if wrong := LLMatcher.validate_grammar(grammar):
        refuse(f"tools: no call can be held to their parameters: {reason(wrong)}")
    return grammar


def _completed(line: str, control: Mapping[str, int]) -> str:
    found = _LINE.fullmatch(line)
    if found is None:
        return line
    rule, kind, given = found[1], found[2], json.loads(found[3])
    if kind == "tag":
        return f"{rule}: {_tag(given, control)}"
    if kind == "until":  # a lazy text ends where its last words are there; a token is none of them
        return f"{rule}{'' if given in control else '[lazy]'}: TEXT {_tag(given, control)}"
    place, schema = given
    try:
        embedded = embedded_json(schema)  # looks for what is wrong with it, too
        return f"{rule}: {embedded}" if kind == "json" else "\n".join(element_rules(rule, schema))
    except RequestError as error:
        raise RequestError(error.code, f"tools: {place}: {error}") from None


def _tag(text: str, control: Mapping[str, int]) -> str:
    return f"<[{control[text]}]>" if text in control else json.dumps(text)
