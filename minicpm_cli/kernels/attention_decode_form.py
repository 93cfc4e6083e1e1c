"""What the decode kernels in CUDA C++ are compiled for, and how they divide the work and their memory."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

from quant.kernels.targets import SHARED_BYTES

LONG = 2048  # tokens of a part, at most, as far as the number of parts allows it
PROCESSORS = 132  # of an H100 or H200
HEADS, GROUPED, STREAM = "attention_decode_heads.cu", "attention_decode_grouped.cu", "attention_decode_stream.cu"


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the model and its cache."""

    width: int
    heads: int
    keys: int
    page: int
    kind: int  # of the cache: 0 as q, 1 float8, 2 int8
    half: bool  # float16, else bfloat16
    turn: int

    @property
    def options(self) -> tuple[str, ...]:
        return _options(("D", "HEADS", "KEYS", "PAGE", "KIND", "FLOAT16", "TURN"), astuple(self))

    @property
    def pieces(self) -> int:
        """Of 16 bytes, in a head."""
        return self.width * (1 if self.kind else 2) // 16


@dataclass(frozen=True, slots=True)
class Cut:
    """A warp for heads, blocks for sequences: the kernels in attention_decode_heads.cu and _grouped.cu."""

    block: int = 1  # warps of a block with heads of their own, where each query head has its own key head
    cluster: int = 1  # blocks along one sequence, at most 8
    warps: int = 4
    depth: int = 2  # tokens of a thread in one step, there too
    stages: int = 4  # steps in the ring
    across: int = 1  # heads of a warp, there too

    @property
    def options(self) -> tuple[str, ...]:
        return _options(("BLOCK", "CLUSTER", "WARPS", "DEPTH", "STAGES", "ACROSS"), astuple(self))

    def source(self, shape: Shape) -> str:
        return HEADS if shape.heads == shape.keys else GROUPED

    def threads(self, shape: Shape) -> int:
        return 32 * self.warps

    def blocks(self, shape: Shape, rows: int, processors: int) -> int:
        group = shape.heads // shape.keys
        alone = shape.heads // (self.block * self.across)
        return rows * self.cluster * (alone if group == 1 else shape.keys * -(-group // 16))

    def shared_bytes(self, shape: Shape) -> int:
        """As the kernels lay it out: a barrier, the warps' rings, the parts of the heads that come together here."""
        part, pieces = (shape.width + 4) * 4, shape.pieces
        if shape.heads == shape.keys:
            side = 32 // (1 << (pieces - 1).bit_length())
            stage = self.depth * 1024 + (side * self.depth * 4 if shape.kind else 0)
            return 16 + self.warps * (self.stages * stage + self.cluster * self.across * part)
        stage = (2 * -(-pieces // 4) + 4 * -(-pieces // 8)) * 512 + (64 if shape.kind else 0)
        return 16 + self.warps * (self.stages * stage + 16 * part) + 8 * shape.width


@dataclass(frozen=True, slots=True)
class Stream:
    """Blocks that stay, and whole tokens: the kernel in attention_decode_stream.cu."""

    usual: int  # parts of a row of up to LONG tokens; the kernel takes any numbers of parts
    splits: int  # parts of a row, at most
    sides: int  # groups of threads, of which each takes its tokens of a stage
    depth: int = 2  # tokens of a group in a stage
    stages: int = 5
    resident: int = 1  # blocks of a processor
    halves: bool = False  # codes are multiplied as float16

    @property
    def options(self) -> tuple[str, ...]:
        return _options(
            ("SIDES", "DEPTH", "STAGES", "RESIDENT", "HALVES", "LONG", "CLUSTER"), (*astuple(self)[2:], LONG, 1)
        )

    @property
    def compiled(self) -> Stream:
        return replace(self, usual=1, splits=1)

    def source(self, shape: Shape) -> str:
        return STREAM

    def fits(self, shape: Shape) -> bool:
        """Full warps, of heads that divide them, and stages that divide a page."""
        whole = 32 % shape.pieces == 0 and self.lanes(shape) * self.sides % 32 == 0
        pages = shape.page % (self.sides * self.depth) == 0 and shape.page % 8 == 0
        return whole and pages and shape.heads == shape.keys and self.shared_bytes(shape) <= SHARED_BYTES

    def lanes(self, shape: Shape) -> int:
        """Threads that hold a token's heads."""
        return shape.heads * shape.pieces

    def threads(self, shape: Shape) -> int:
        return self.lanes(shape) * self.sides + 32

    def blocks(self, shape: Shape, rows: int, processors: int) -> int:
        return min(processors * self.resident, rows * self.splits)

    def shared_bytes(self, shape: Shape) -> int:
        """As the kernel lays it out: ring, scales, what sides send one another, its heads and barriers, a flag."""
        token, scales = 32 * self.lanes(shape), 4 * shape.heads * shape.page if shape.kind else 0
        sent = (self.sides - 1) * self._sums(shape) * 4
        return self.stages * (self.sides * self.depth * token + scales + 32) + sent + 16

    def parts(self, shape: Shape, rows: int) -> int:
        """Numbers that blocks leave for the one that puts a row together."""
        return rows * self.splits * self._sums(shape) if self.splits > 1 else 0

    def _sums(self, shape: Shape) -> int:
        """Of a token's heads: a thread's sums, maximum and total."""
        return self.lanes(shape) * ((16 if shape.kind else 8) + 2)


def streamed(rows: int, shape: Shape, longest: int, processors: int) -> Stream | None:
    """With 288 threads to 576 for what a stage holds; None where a shape does not allow it."""
    usual = _usual_parts(rows, processors)
    most = max(usual, min(-(-longest // LONG), 32))
    for sides in (4, 2, 1):
        cut = Stream(usual, most, sides, halves=shape.kind > 0)
        if 288 <= cut.threads(shape) - 32 <= 576 and cut.fits(shape):
            return cut
    return None


def _usual_parts(rows: int, processors: int) -> int:
    """So that processors are idle for little time at the end; a part costs as much as some 20 tokens besides."""
    return min(range(1, 17), key=lambda n: -(-rows * n // processors) * (1 / n + 1 / 30))


def _options(names: tuple[str, ...], values: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(f"-D{name}={int(n)}" for name, n in zip(names, values, strict=True))
