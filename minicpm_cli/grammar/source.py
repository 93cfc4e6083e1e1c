"""What a request asks of its answer, as a grammar of llguidance; what is wrong with it is said with its place."""

from __future__ import annotations

import json
import time
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

from minicpm_cli.errors import RequestError
from minicpm_cli.grammar.pointers import subschemas, unsupported, without_neutral
from minicpm_cli.types import SamplingParams

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Between the tokens of JSON: nothing, a space, or a new line with its indentation. A model that goes on and on with
# white space where any is allowed would run to its limit.
WHITESPACE = r" ?|\n[ \t]{0,32}"
_OPTIONS: JsonCompileOptions = {
    "whitespace_pattern": WHITESPACE,
    "whitespace_flexible": True,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
LONGEST = 1 << 20  # characters of a schema or regex; 5,000 names of 5,000 letters take half a second to compile
_ALL = {"type": "object", "additionalProperties": True}
_DEFINITIONS = ("$schema", "$id", "$defs", "definitions")
_DEFINED = ("/$defs", "/definitions")
MOST_TRIED = 200  # subschemas, in search of the one that is wrong
LONGEST_SEARCH = 1.0  # seconds for that


class Source(NamedTuple):
    """The text of a schema or a regular expression, or the rules of a call."""

    kind: Literal["schema", "regex", "call"]
    text: str

    @classmethod
    def of(cls, params: SamplingParams) -> Source | None:
        """Raises RequestError(bad_parameter) if there are both."""
        if params.schema is not None and params.regex is not None:
            raise RequestError("bad_parameter", "the answer can follow a schema or a regex, not both; leave one out")
        if params.schema is not None:
            return cls("schema", params.schema)
        return None if params.regex is None else cls("regex", params.regex)


def check(params: SamplingParams) -> None:
    """Raises RequestError(schema_invalid | bad_parameter) for a schema or regex that no answer can follow."""
    source = Source.of(params)
    if source is not None:
        grammar_of(source)


def grammar_of(source: Source) -> str:
    """The grammar of a schema or regex as llguidance reads it. Raises RequestError(schema_invalid)."""
    if len(source.text) > LONGEST:
        refuse(f"the {source.kind} has {len(source.text):,} characters; {LONGEST:,} are the most")
    return json_grammar(source.text) if source.kind == "schema" else _of_regex(source.text)


def _of_regex(regex: str) -> str:
    from llguidance import LLMatcher, regex_to_lark

    # The digits of \d are 0 to 9: a constraint is not meant to bring forth those of other scripts.
    grammar: str = LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(regex, 'd')}/")
    if wrong := LLMatcher.validate_grammar(grammar):
        refuse(f"the regex {_clipped(regex)} cannot be used: {reason(wrong)}")
    return grammar


def json_grammar(text: str) -> str:
    """Raises RequestError(schema_invalid) with the place that is wrong."""
    schema = _parsed(text)
    if (found := unsupported(schema)) is not None:
        place, wrong = found
        refuse(f"the schema at {place or '/'}: {wrong}")
    grammar, wrong = _compiled(without_neutral(schema))
    if wrong:
        refuse(f"the schema at {_place(schema, wrong) or '/'}: {wrong}")
    return grammar


def embedded_json(schema: dict[str, Any]) -> str:
    """The schema as a part of a grammar in Lark's notation. Raises as `json_grammar`."""
    json_grammar(json.dumps(schema))
    return f"%json {json.dumps({**without_neutral(schema), 'x-guidance': _OPTIONS})}"


def _parsed(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        refuse(f"the schema is not JSON: {error.msg} at line {error.lineno}, column {error.colno}")
    except (RecursionError, ValueError) as error:
        refuse(f"the schema is not JSON that can be read: {error}")
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        refuse(f"the schema is {_clipped(text)}; it must be an object such as {json.dumps(_ALL)}")
    return schema


def _compiled(schema: dict[str, Any]) -> tuple[str, str]:
    """The grammar, and what is wrong with it. Options that a schema brings along itself are overruled."""
    from llguidance import LLMatcher

    try:
        grammar: str = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_OPTIONS)
        return grammar, reason(LLMatcher.validate_grammar(grammar))
    except ValueError as error:
        return "", reason(str(error))


def _place(schema: dict[str, Any], wrong: str) -> str:
    """The innermost subschema that fails in the same way alone, beside the definitions; those are looked at first."""
    started = time.monotonic()
    around = {word: schema[word] for word in _DEFINITIONS if word in schema}
    places = sorted(islice(subschemas(schema), MOST_TRIED), key=lambda each: not each[0].startswith(_DEFINED))
    for place, inner in places:
        if time.monotonic() - started > LONGEST_SEARCH:
            break
        if _compiled({**around, **inner})[1] == wrong:
            return place
    return ""


def reason(message: str) -> str:
    """On one line, without the state of a parser and without the drawing under a regex."""
    lines = [line.strip() for line in message.split("<state>")[0].splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if errors:
        return errors[0]
    if lines and lines[0].startswith("oneOf constraints"):
        return "oneOf is supported only where no value can match two of its schemas; use anyOf"
    return lines[0] if lines else ""


def _clipped(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def refuse(message: str) -> NoReturn:
    raise RequestError("schema_invalid", message)
