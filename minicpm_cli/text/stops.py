"""Finds stop strings in text that comes in pieces, at a cost per character that does not grow with their number."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class StopMatcher:
    """Aho and Corasick's automaton (CACM 18(6), 1975) that holds back only what may still become a stop string.

    After a match `rest` is the text behind it.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._next, self._fail, self._depth, self._match = _automaton([s for s in stops if s])
        self._state = 0
        self._held = ""
        self.rest = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that is certain not to belong to a stop string, and whether one was found (it is cut off)."""
        if len(self._next) == 1:
            return text, False
        state, goto, fail = self._state, self._next, self._fail
        for at, char in enumerate(text):
            while state and char not in goto[state]:
                state = fail[state]
            state = goto[state].get(char, 0)
            if self._match[state]:
                whole = self._held + text[: at + 1]
                self._held, self._state, self.rest = "", 0, text[at + 1 :]
                return whole[: len(whole) - self._match[state]], True
        self._state = state
        whole = self._held + text
        keep = len(whole) - self._depth[state]
        self._held = whole[keep:]
        return whole[:keep], False

    def flush(self) -> str:
        """What was held back; nothing more comes."""
        held, self._held, self._state = self._held, "", 0
        return held


def _automaton(stops: list[str]) -> tuple[list[dict[str, int]], list[int], list[int], list[int]]:
    """Per state: where a character leads, where to fall back, how many characters it has read, the match's length."""
    goto: list[dict[str, int]] = [{}]
    depth, match = [0], [0]
    for stop in stops:
        state = 0
        for char in stop:
            if char not in goto[state]:
                goto[state][char] = len(goto)
                goto.append({})
                depth.append(depth[state] + 1)
                match.append(0)
            state = goto[state][char]
        match[state] = len(stop)
    return goto, _fallbacks(goto, match), depth, match


def _fallbacks(goto: list[dict[str, int]], match: list[int]) -> list[int]:
    fail = [0] * len(goto)
    queue = deque(goto[0].values())
    while queue:
        state = queue.popleft()
        match[state] = match[state] or match[fail[state]]
        for char, after in goto[state].items():
            back = fail[state]
            while back and char not in goto[back]:
                back = fail[back]
            fail[after] = goto[back].get(char, 0)
            queue.append(after)
    return fail
