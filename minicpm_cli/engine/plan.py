"""What one step computes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Literal, NamedTuple

from minicpm_cli.engine.sequence import Sequence

Kind = Literal["greedy", "drawn", "penalised", "hosted"]  # what a step's draw has to look at; the host draws the last


def kind_of(seqs: Iterable[Sequence]) -> Kind:
    kind: Kind = "greedy"
    for seq in seqs:
        if seq.penalised:
            return "penalised"
        if not seq.greedy:
            kind = "drawn"
    return kind


class Chunk(NamedTuple):
    """Tokens start..start+size of a sequence; it is sampled when they are its last ones."""

    seq: Sequence
    start: int
    size: int
    sample: bool


class Plan:
    """`sampled` are the sequences that a next token is drawn for. The first `decoding` chunks are one token of each.

    `extra` of the chunks are rows of drafts: they follow the row of their sequence's last token, and each draws what
    comes next if the draft is right so far.
    """

    def __init__(self, chunks: list[Chunk], extra: int = 0) -> None:
        self._chunks, self.rows, self.extra = chunks, len(chunks), extra
        self.sampled = [seq for seq, _, _, sample in chunks if sample]
        self.tokens = sum([size for _, _, size, _ in chunks])
        self.decodes = self.tokens == len(chunks) == len(self.sampled)
        self.decoding = len(chunks)
        if not self.decodes:
            others = (i for i, (_, _, size, sample) in enumerate(chunks) if size > 1 or not sample)
            self.decoding = next(others, len(chunks))
        self.hosted = True in [seq.hosted for seq, _, _, _ in chunks]
        self.masked = True in [seq.masked for seq in self.sampled]

    @property
    def chunks(self) -> list[Chunk]:
        return self._chunks

    @cached_property
    def kind(self) -> Kind:
        """What the draw has to look at, wherever it takes place."""
        return kind_of(self.sampled)

    def joined(self) -> list[Chunk]:
        """The chunks, with the rows of a draft and the one before them as one run: its keys are read once."""
        if not self.extra:
            return self.chunks
        runs: list[Chunk] = []
        for chunk in self.chunks:
            if runs and runs[-1].seq is chunk.seq:
                runs[-1] = runs[-1]._replace(size=runs[-1].size + 1)
            else:
                runs.append(chunk)
        return runs
