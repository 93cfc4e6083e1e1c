"""Markdown within a line while it is still being written: what is complete, and what it means.

A mark that opens (`**`, a backtick, a bracket) waits for the one that closes, but after `REACH` characters
it is text. So nothing that was shown has ever to be changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from minicpm_cli.chat.breaks import breaks, has_wide
from minicpm_cli.chat.terminal import neutral

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_inline import StateInline
    from markdown_it.token import Token
    from rich.text import Text

REACH = 300
_MARKS = re.compile(r"\\.|`+|\*+|_+|~{2,}|!?\[", re.DOTALL)
_SPECIAL = re.compile(r"[\\`*_~\[<&]")
_STYLES = {"strong": "markdown.strong", "em": "markdown.em", "s": "markdown.s", "link": "markdown.link"}
_ESCAPES_OF_TEX = frozenset("()[]{}")


def chunks(text: str) -> tuple[list[str], str]:
    """Cuts `text` into parts that mean the same by themselves and end where a row may end, and what is still open."""
    places = _settled(text)
    parts = [text[start:end] for start, end in zip([0, *places], places, strict=False)]
    return parts, text[places[-1] :] if places else text


def _settled(text: str) -> list[int]:
    """Places between complete constructs. They do not change when more text follows."""
    spans, end = _constructs(text)
    inside = iter([*spans, (len(text) + 1, len(text) + 1)])
    start, stop = next(inside)
    settled = []
    for place in breaks(text):
        if place > end:
            break
        while place >= stop:
            start, stop = next(inside)
        if 0 < place <= start:
            settled.append(place)
    return settled


def _constructs(text: str) -> tuple[list[tuple[int, int]], int]:
    """Where constructs begin and end, in order, and the place from which on it is not known yet."""
    spans: list[tuple[int, int]] = []
    place = 0
    while match := _MARKS.search(text, place):
        start, mark = match.start(), match[0]
        if match.end() == len(text) and mark[0] != "!":
            return spans, start  # it may go on
        if mark[0] == "\\":
            place = match.end()
            continue
        end = _END[mark[-1]](text, start, mark)
        if end is None:
            return spans, start
        if end > match.end():
            spans.append((start, end))
        place = end
    return spans, len(text)


def _end_of_code(text: str, start: int, mark: str) -> int | None:
    after = start + len(mark)
    match = re.compile(rf"(?<!`){mark}(?!`)").search(text, after)
    return _within(text, start, after, match.end() if match and match.end() < len(text) else None)


def _end_of_link(text: str, start: int, mark: str) -> int | None:
    after = start + len(mark)
    close = _closing(text, after, "[", "]")
    if close is None:
        return _within(text, start, after, None)
    if close == len(text):
        return None
    if text[close] != "(":
        return after
    return _within(text, start, after, _closing(text, close + 1, "(", ")"))


def _end_of_emphasis(text: str, start: int, mark: str) -> int | None:
    """The end of what the mark opens, with all that is inside (CommonMark, section 6.2)."""
    after = start + len(mark)
    if not flanks(text, start, after)[0]:
        return after
    left, place = len(mark), after
    while match := _MARKS.search(text, place):
        if match.end() == len(text) or match.start() - start > REACH:
            break
        place = match.end()
        if match[0][0] == "`":
            code = _end_of_code(text, match.start(), match[0])
            if code is None:
                return None
            place = code
        elif match[0][0] == mark[0]:
            opens, closes = flanks(text, match.start(), match.end())
            left += -len(match[0]) if closes else len(match[0]) if opens else 0
            if left <= 0:
                return match.end()
    return _within(text, start, after, None)


_END = {"`": _end_of_code, "[": _end_of_link, "*": _end_of_emphasis, "_": _end_of_emphasis, "~": _end_of_emphasis}


def _within(text: str, start: int, after: int, end: int | None) -> int | None:
    """`end` if it is in reach, `after` the mark if it can be no more, None while it may still come."""
    if end is not None and end - start <= REACH:
        return end
    return after if end is not None or len(text) - start > REACH else None


def _closing(text: str, place: int, opening: str, closing: str) -> int | None:
    """The place after the bracket that closes the one before `place`."""
    depth = 1
    for i in range(place, min(len(text), place + REACH)):
        depth += (text[i] == opening) - (text[i] == closing)
        if not depth:
            return i + 1
    return None


def flanks(text: str, start: int, end: int) -> tuple[bool, bool]:
    """Whether the run of marks may open and close emphasis: CommonMark's rule, amended for Chinese and Japanese.

    Their letters stand where other scripts have a space, so that **this：**is bold.
    """
    before, after = text[start - 1 : start] or " ", text[end : end + 1] or " "
    free_before = before.isspace() or _is_punctuation(before) or has_wide(before)
    free_after = after.isspace() or _is_punctuation(after) or has_wide(after)
    left = not after.isspace() and (not _is_punctuation(after) or free_before)
    right = not before.isspace() and (not _is_punctuation(before) or free_after)
    if text[start] == "_":
        return left and (not right or free_before), right and (not left or free_after)
    return left, right


def _is_punctuation(character: str) -> bool:
    from markdown_it.common.utils import isMdAsciiPunct, isPunctChar

    return isMdAsciiPunct(ord(character)) or isPunctChar(character)


def inline(text: str) -> Text:
    """A part as `chunks` gives it, its marks turned into styles; what has no marks of its own is shown as it is."""
    from rich.text import Text

    if not _SPECIAL.search(text):
        return Text(text)
    body = text.lstrip()
    out = Text(text[: len(text) - len(body)])
    _Styled(out).take(_parser().parseInline(body)[0].children or ())
    return out


@dataclass(slots=True)
class _Styled:
    """Tokens become text; tags, definitions, addresses and line breaks are shown, not obeyed."""

    out: Text

    def take(self, tokens: Iterable[Token]) -> None:
        open_: list[tuple[int, str]] = []
        for token in tokens:
            kind, content = token.type, neutral(token.content)
            if kind.endswith("_open"):
                open_.append((len(self.out), str(token.attrGet("href") or "")))
            elif kind.endswith("_close"):
                self._close(kind.removesuffix("_close"), *open_.pop())
            elif kind == "code_inline":
                self.out.append(content, "bold cyan")
            elif kind in ("softbreak", "hardbreak"):
                self.out.append("\n")
            elif kind == "image":
                self.out.append(f"{content} ({neutral(str(token.attrGet('src')))})", "markdown.link")
            else:
                self.out.append(token.markup if _is_tex(token) else content)

    def _close(self, kind: str, start: int, address: str) -> None:
        shown = self.out.plain[start:]
        self.out.stylize(_STYLES[kind], start)
        if address and shown not in (address, address.removeprefix("mailto:")):
            self.out.append(f" ({neutral(address)})" if shown else neutral(address), "markdown.link_url")


def _is_tex(token: Token) -> bool:
    r"""\( and \[ begin a formula, wherever a model writes them."""
    return token.type == "text_special" and token.info == "escape" and token.content in _ESCAPES_OF_TEX


@cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").disable(["reference", "text_join"])
    parser.inline.ruler.at("emphasis", _emphasis)
    return parser


def _emphasis(state: StateInline, silent: bool) -> bool:
    """markdown-it's rule of this name, with our `flanks`."""
    from markdown_it.rules_inline.state_inline import Delimiter

    start, mark = state.pos, state.src[state.pos]
    if silent or mark not in "_*":
        return False
    end = start
    while end < state.posMax and state.src[end] == mark:
        end += 1
    opens, closes = flanks(state.src, start, end)
    for _ in range(end - start):
        state.push("text", "", 0).content = mark
        token = len(state.tokens) - 1
        state.delimiters.append(
            Delimiter(marker=ord(mark), length=end - start, token=token, end=-1, open=opens, close=closes)
        )
    state.pos = end
    return True
