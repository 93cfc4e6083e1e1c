"""Decode kernels in CUDA C++ compiled for the CPU and run thread by thread, against float64."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from test_attention_decode import error, expected, random_cache, shuffled_table
from torch import Tensor

from minicpm_cli.kernels import reference
from minicpm_cli.kernels.attention_decode_cuda import COMMON, FOLDER, KINDS, Parameters, fill, share, text
from minicpm_cli.kernels.attention_decode_form import Cut, Shape, Stream
from minicpm_cli.kernels.cache import LayerCache

EMULATOR = Path(__file__).with_name("attention_emulator.cpp")
PAGE, WIDTH = 16, 64
LENGTHS = (1, 15, 16, 17, 150, 300)
BF16, F16, FP8, INT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
TOLERANCE = {BF16: 3e-3, F16: 3e-4}


@dataclass
class Emulator:
    """The kernels' libraries by what they are compiled for."""

    compiler: str
    folder: Path
    libraries: dict[tuple[Shape, Cut | Stream], ctypes.CDLL] = field(default_factory=dict)

    def __call__(self, shape: Shape, cut: Cut | Stream) -> ctypes.CDLL:
        key = shape, cut.compiled if isinstance(cut, Stream) else cut
        if key not in self.libraries:
            to = self.folder / f"{len(self.libraries)}.so"
            source = to.with_suffix(".cu")
            source.write_text(text(cut.source(shape)).removeprefix((FOLDER / COMMON[0]).read_text()))
            options = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w", f'-DKERNEL="{source}"']
            call = [self.compiler, *options, *shape.options, *cut.options, "-o", str(to), str(EMULATOR)]
            subprocess.run(call, check=True)
            self.libraries[key] = ctypes.CDLL(str(to))
        return self.libraries[key]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the emulated kernel")
    return Emulator(compiler, tmp_path_factory.mktemp("attention"))


@dataclass
class Step:
    """Rows of a decode step, each with its newest token not yet stored if `turn` is set."""

    lengths: tuple[int, ...]
    cache: LayerCache
    table: Tensor
    qkv: Tensor
    turn: tuple[Tensor, Tensor] | None

    @property
    def heads(self) -> int:
        return self.cache.k.shape[2]

    @property
    def q(self) -> Tensor:
        return self.qkv if self.turn else self.qkv[:, : self.heads]

    def shape(self) -> Shape:
        kind, half = KINDS.get(self.cache.k.dtype, 0), WIDTH // 2 if self.turn else 0
        return Shape(WIDTH, self.heads, self.heads, PAGE, kind, self.qkv.dtype == F16, half)

    def of(self, rows: list[int]) -> Step:
        turn = (self.turn[0][rows], self.turn[1][rows]) if self.turn else None
        return Step(tuple(self.lengths[r] for r in rows), self.cache, self.table[rows], self.qkv[rows], turn)


def step(heads: int, cached: torch.dtype, turn: bool, lengths: tuple[int, ...] = LENGTHS) -> Step:
    torch.manual_seed(0)
    table, pages = shuffled_table(lengths, PAGE, "cpu")
    cache = random_cache(pages, PAGE, heads, WIDTH, WIDTH, cached, "cpu")
    qkv = torch.randn(len(lengths), 3 * heads, WIDTH).to(F16 if cached == F16 else BF16)
    angles = torch.rand(len(lengths), 1, WIDTH // 2) * 6
    return Step(lengths, cache, table, qkv, (angles.cos(), angles.sin()) if turn else None)


def run(emulated: Emulator, s: Step, cut: Cut | Stream, processors: int = 4, parts: Tensor | None = None) -> Tensor:
    """On a single processor warps fall behind others."""
    rows, shape = len(s.lengths), s.shape()
    out = torch.full((rows, s.heads, WIDTH), torch.nan, dtype=s.qkv.dtype)
    p, kv_len = Parameters(), torch.tensor(s.lengths, dtype=torch.int32)
    counters = torch.zeros(1 + rows, dtype=torch.int32)
    if isinstance(cut, Stream):
        parts = torch.full((cut.parts(shape, rows),), torch.nan) if parts is None else parts
        share(p, cut, rows, parts, counters)
    fill(p, s.q, s.cache, s.table, kv_len, 0.125, s.turn, out)
    library = emulated(shape, cut)
    library.emulate(ctypes.byref(p), cut.blocks(shape, rows, processors), cut.threads(shape), processors == 1)
    assert not library.overrun(cut.shared_bytes(shape))
    assert not library.too_early()
    assert not counters.any()
    return out


def check(emulated: Emulator, s: Step, cut: Cut | Stream, processors: int = 4) -> None:
    found = run(emulated, s, cut, processors)
    if s.turn:  # what the launch stored, and then that of the operations one after the other
        stored, scales = s.cache.rows.clone(), None if s.cache.scales is None else s.cache.scales.clone()
        last = torch.tensor(s.lengths) - 1
        slots = s.table[range(len(last)), last // PAGE].long() * PAGE + last % PAGE
        reference.rope_store(s.qkv, *s.turn, s.heads, s.cache, slots)
        assert torch.equal(stored.float()[slots], s.cache.rows.float()[slots])
        assert scales is None or torch.equal(scales, s.cache.scales)
    wanted = expected(s.qkv[:, : s.heads], s.cache, s.table, s.lengths, 0.125)
    assert error(found, wanted) < TOLERANCE[s.qkv.dtype]


@pytest.mark.parametrize(
    ("cached", "cut", "turn"),
    [
        (BF16, Cut(), True),
        (FP8, Cut(across=2), False),
        (INT8, Cut(across=4, depth=4, stages=3), True),
        (F16, Cut(block=2, warps=4, depth=1), False),
    ],
)
def test_warps_of_heads(emulated: Emulator, cached: torch.dtype, cut: Cut, turn: bool) -> None:
    check(emulated, step(4, cached, turn), cut)


@pytest.mark.parametrize(
    ("cached", "cut", "turn"),
    [
        (BF16, Stream(3, 3, sides=2, stages=3), False),
        (F16, Stream(2, 2, sides=1, depth=4, stages=2), True),
        (FP8, Stream(3, 3, sides=4), True),
        (FP8, Stream(2, 2, sides=4, halves=True), True),
        (INT8, Stream(4, 4, sides=2, depth=4, stages=2, halves=True), False),
    ],
)
@pytest.mark.parametrize("processors", [1, 4])
def test_streams(emulated: Emulator, cached: torch.dtype, cut: Stream, turn: bool, processors: int) -> None:
    check(emulated, step(4, cached, turn), cut, processors)


@pytest.mark.parametrize(("cached", "sides"), [(BF16, 2), (FP8, 4)])
def test_a_stream_of_36_heads(emulated: Emulator, cached: torch.dtype, sides: int) -> None:
    check(emulated, step(36, cached, False, (37, 100)), Stream(2, 2, sides=sides))


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_a_row_of_a_stream_is_the_same_whatever_stands_beside_it(emulated: Emulator, splits: int) -> None:
    """To the bit, whoever computes its parts."""
    s, cut = step(4, FP8, False), Stream(splits, splits, sides=4)
    together, alone = run(emulated, s, cut), run(emulated, s.of([4]), cut, processors=3)
    turned = run(emulated, s.of([5, 4, 3, 2, 1, 0]), cut, processors=7)
    assert torch.equal(together, turned.flip(0))
    assert torch.equal(together[4:5], alone)


def test_a_long_row_of_a_stream_is_cut_into_more_parts(emulated: Emulator) -> None:
    """And comes out as with as many for all rows; a short one as with a single part."""
    s, cut = step(4, FP8, False, (2100, 50)), Stream(1, 3, sides=4)
    parts = torch.full((cut.parts(s.shape(), 2),), torch.nan)
    found = run(emulated, s, cut, parts=parts)
    sums = parts[: 2 * 3 * 4 * WIDTH].view(2, 3, 4 * WIDTH)
    assert sums.isfinite().all(-1).tolist() == [[True, True, False], [False, False, False]]
    assert torch.equal(found[0], run(emulated, s, Stream(2, 2, sides=4))[0])
    assert torch.equal(found[1], run(emulated, s, Stream(1, 1, sides=4))[1])


@pytest.mark.parametrize(("cached", "cut"), [(BF16, Stream(1, 1, sides=2)), (INT8, Stream(2, 2, sides=4, halves=True))])
def test_a_row_of_more_pages_than_a_warp_holds_numbers_of(emulated: Emulator, cached: torch.dtype, cut: Stream) -> None:
    check(emulated, step(4, cached, False, (1100, 530, 2)), cut)
