"""What one step computes."""

from __future__ import annotations

from typing import NamedTuple

from minicpm_cli.engine.sequence import Sequence


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
        self.chunks, self.extra = chunks, extra
        self.sampled = [seq for seq, _, _, sample in chunks if sample]
        self.tokens = sum([size for _, _, size, _ in chunks])
        self.decodes = self.tokens == len(chunks) == len(self.sampled)
        self.decoding = len(chunks)
        if not self.decodes:
            others = (i for i, (_, _, size, sample) in enumerate(chunks) if size > 1 or not sample)
            self.decoding = next(others, len(chunks))
        self.hosted = True in [seq.hosted for seq, _, _, _ in chunks]
        self.masked = True in [seq.masked for seq in self.sampled]

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
