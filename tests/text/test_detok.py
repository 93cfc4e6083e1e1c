"""Streaming gives the text that decoding at once gives: characters, stop strings and thinking, however tokens fall."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minicpm_cli.text.detok import TextSink
from minicpm_cli.text.tokenizer import Tokenizer
from minicpm_cli.types import Channel


class Pieces:
    """A tokenizer of 256 byte tokens, then given pieces; those in `control` are control tokens."""

    def __init__(self, pieces: Iterable[bytes] = (), control: Sequence[str] = ()) -> None:
        self._pieces = [*(bytes([b]) for b in range(256)), *pieces, *(c.encode() for c in control)]
        first = len(self._pieces) - len(control)
        self.control_text = {text: first + n for n, text in enumerate(control)}
        self.control_ids = frozenset(self.control_text.values())

    def piece(self, ident: int) -> bytes:
        return self._pieces[ident]


BYTES = Pieces()
CONTROL = Pieces(control=["<think>", "</think>", "<|im_end|>"])


def run(
    chunks: Iterable[bytes | int],
    stops: Sequence[str] = (),
    start: Channel = "answer",
    *,
    show_control: bool = False,
) -> tuple[str, str, bool]:
    """(thoughts, answer, stopped), taken after every token; an int is a control token's number."""
    chunks = list(chunks)
    pieces = [chunk for chunk in chunks if isinstance(chunk, bytes)]
    tokenizer = Pieces(pieces, ["<think>", "</think>", "<|im_end|>"])
    sink = TextSink(tokenizer, stops, start, show_control=show_control)  # type: ignore[arg-type]
    texts = {"think": "", "answer": ""}
    next_piece = 256
    for chunk in chunks:
        token = chunk + 256 + len(pieces) if isinstance(chunk, int) else next_piece
        next_piece += isinstance(chunk, bytes)
        if sink.push(token) == "stop":
            break
        for channel, text in sink.take():
            texts[channel] += text
    for channel, text in sink.close():
        texts[channel] += text
    return texts["think"], texts["answer"], sink.stopped


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The definition: the first end of a stop decides, and the longest stop that ends there is cut off."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def split(data: bytes, places: Iterable[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(p % (len(data) + 1) for p in places)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


places = st.lists(st.integers(0, 200), max_size=12)


class TestCharacters:
    @pytest.mark.parametrize("text", ["世", "👨‍👩‍👧", "é", "a世界🎉b"])
    def test_no_character_is_ever_halved(self, text: str) -> None:
        sink, seen = TextSink(BYTES), []  # type: ignore[arg-type]
        for byte in text.encode():
            sink.push(byte)
            seen += [piece for _, piece in sink.take()]
        assert "".join(seen) == text
        assert "\ufffd" not in "".join(seen)
        assert sink.close() == []

    @given(st.lists(st.integers(0, 255), max_size=30))
    def test_any_bytes_stream_as_they_decode_at_once(self, data: list[int]) -> None:
        expected = bytes(data).decode("utf-8", "replace")
        if not expected.lstrip().startswith("<"):
            assert run([bytes([b]) for b in data])[1] == expected

    def test_an_unfinished_character_is_one_replacement(self) -> None:
        assert run([b"a", "世".encode()[:2]]) == ("", "a\ufffd", False)

    def test_stop_in_the_middle_of_a_character(self) -> None:
        assert run([b"ab", "世".encode()[:1]], ["b"]) == ("", "a", True)

    def test_space_at_the_start_is_kept(self, spm: Tokenizer) -> None:
        sink = TextSink(spm)
        ids = spm.encode("the fox", control=False)
        for ident in ids:
            sink.push(ident)
        assert sink.close() == [("answer", " the fox")]
        assert spm.decode(ids) == " the fox"

    @given(st.lists(st.integers(0, 10**6), max_size=20))
    def test_real_tokens_stream_as_they_decode_at_once(self, byte: Tokenizer, spm: Tokenizer, draws: list[int]) -> None:
        for tokenizer in (byte, spm):
            ids = [d % tokenizer.vocab_size for d in draws]
            ids = [i for i in ids if i not in tokenizer.control_ids]
            sink = TextSink(tokenizer, think_tags=())
            for ident in ids:
                sink.push(ident)
            assert "".join(text for _, text in sink.close()) == tokenizer.decode(ids)


class TestStops:
    @pytest.mark.parametrize(
        ("chunks", "stops", "answer"),
        [
            ([b"hi\nUser", b":", b" no"], ["\nUser:"], "hi"),
            ([b"alpha be", b"ta ga", b"mma delta"], ["beta gamma"], "alpha "),
            ([b"xab", b"c"], ["abc", "ab"], "x"),
            ([b"xabd"], ["abc", "ab"], "x"),
            ([b"abcd"], ["bcd", "c"], "ab"),
            ([b"zabc"], ["bc", "abc"], "z"),
            ([b"aaab"], ["aab"], "a"),
            ([b"\n", b"\n"], ["\n\n"], ""),
            (["世界".encode()[:4], "世界".encode()[4:]], ["界"], "世"),
        ],
    )
    def test_cut(self, chunks: list[bytes], stops: list[str], answer: str) -> None:
        assert run(chunks, stops) == ("", answer, True)

    def test_what_was_held_back_comes_at_the_end(self) -> None:
        assert run([b"hi\nUser"], ["\nUser:"]) == ("", "hi\nUser", False)

    def test_only_a_beginning_of_a_stop_is_held_back(self) -> None:
        sink = TextSink(BYTES, ["\nUser:"])  # type: ignore[arg-type]
        for byte in b"hi\nUs":
            sink.push(byte)
        assert sink.take() == [("answer", "hi")]
        sink.push(ord("x"))
        assert sink.take() == [("answer", "\nUsx")]

    def test_the_request_ends_with_the_token_that_completes_the_stop(self) -> None:
        sink = TextSink(BYTES, ["ab"])  # type: ignore[arg-type]
        assert [sink.push(b) for b in b"xabz"] == [None, None, "stop", "stop"]
        assert sink.close() == [("answer", "x")]
        assert sink.close() == []

    @given(st.text("ab \n<", max_size=30), st.lists(st.text("ab \n<", min_size=1, max_size=4), max_size=4), places)
    @example("\n <a", ["\n <a"], [1])
    def test_any_text_any_stops_any_tokens(self, text: str, stops: list[str], where: list[int]) -> None:
        answer, stopped = cut(text, stops)
        assert run(split(text.encode(), where), stops) == ("", answer, stopped)


class TestThinking:
    @pytest.mark.parametrize(
        ("text", "start", "thoughts", "answer"),
        [
            ("I think.\n</think>\n\nYes.", "think", "I think.", "Yes."),
            ("\nI think.</think>Yes. ", "think", "I think.", "Yes. "),
            ("<think>\nhm\n\nhm\n</think>\n\n4", "answer", "hm\n\nhm", "4"),
            ("\n <think>hm</think> 4", "answer", "hm", "4"),
            ("<think>\n\n</think>\n\n4", "answer", "", "4"),
            ("<|thought_start|>hm<|thought_end|>\n4", "answer", "hm", "4"),
            ("Write <think> like this </think>.", "answer", "", "Write <think> like this </think>."),
            ("<think>never closed", "answer", "never closed", ""),
            ("never closed </thi", "think", "never closed </thi", ""),
            ("trailing space \n", "think", "trailing space \n", ""),
            ("<thin", "answer", "", "<thin"),
            ("<thing>", "answer", "", "<thing>"),
            (" <thing>", "answer", "", " <thing>"),
            ("  ", "answer", "", "  "),
            ("a </b> c</think>d", "think", "a </b> c", "d"),
        ],
    )
    @given(where=places)
    def test_tags_as_text(self, text: str, start: Channel, thoughts: str, answer: str, where: list[int]) -> None:
        assert run(split(text.encode(), where), (), start) == (thoughts, answer, False)

    @pytest.mark.parametrize(
        ("chunks", "start", "thoughts", "answer"),
        [
            ([0, b"\nhm\n", 1, b"\n\n4"], "answer", "hm", "4"),
            ([b"hm", 1, b"4"], "think", "hm", "4"),
            ([b"one", 0, b"two", 1, b"three"], "answer", "two", "onethree"),
            ([b"hm </th", 1, b"4"], "think", "hm </th", "4"),
            ([b"4", 1, b"5"], "answer", "", "45"),
            ([b" \n", 0, b"hm", 1, b"4"], "answer", "hm", "4"),
            ([b"4", 2], "answer", "", "4"),
            ([0], "answer", "", ""),
        ],
    )
    def test_tags_as_control_tokens(
        self, chunks: list[bytes | int], start: Channel, thoughts: str, answer: str
    ) -> None:
        assert run(chunks, (), start) == (thoughts, answer, False)

    def test_control_tokens_can_be_shown(self) -> None:
        assert run([b"4", 2], show_control=True)[1] == "4<|im_end|>"
        assert run([0, b"a", 1, b"4", 2], show_control=True)[:2] == ("a", "4<|im_end|>")

    def test_stops_are_for_the_answer(self) -> None:
        assert run([b"a\nb</think>c\nd"], ["\n"], "think") == ("a\nb", "c", True)

    def test_half_a_character_before_a_tag(self) -> None:
        assert run(["世".encode()[:2], 1, b"4"], (), "think") == ("\ufffd", "4", False)

    def test_no_tags_no_split(self) -> None:
        sink = TextSink(BYTES, think_tags=())  # type: ignore[arg-type]
        for byte in b"<think>a</think>":
            sink.push(byte)
        assert sink.close() == [("answer", "<think>a</think>")]

    @given(
        st.lists(st.sampled_from(["<think>", "</think>", "<", "a", " ", "\n", "世"]), max_size=10).map("".join),
        st.lists(st.sampled_from(["a", "\n", "<", "a世", "k>"]), max_size=2),
        st.sampled_from(["answer", "think"]),
        places,
    )
    def test_the_cut_into_tokens_never_matters(
        self, text: str, stops: list[str], start: Channel, where: list[int]
    ) -> None:
        data = text.encode()
        assert run(split(data, where), stops, start) == run([data], stops, start)
