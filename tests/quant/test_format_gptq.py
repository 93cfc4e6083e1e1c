"""GPTQ files against the textbook reading of their words, and there and back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from textbook import code_at, random_groups, same, weights
from torch import Tensor

from quant.errors import FormatError
from quant.formats import gptq
from quant.pack import GroupInt

VERSIONS = gptq.VERSIONS


def textbook(tensors: dict[str, Tensor], bits: int, version: str) -> Tensor:
    """[N, K] float32 from a file's tensors."""
    k, n = tensors["qweight"].shape[0] * 32 // bits, tensors["scales"].shape[1]
    less = 1 if version == "gptq" else 0
    words, zeros = tensors["qweight"].T, tensors["qzeros"]
    codes = [[code_at(words, row, c, bits) for c in range(k)] for row in range(n)]
    points = [[code_at(zeros, g, row, bits) + less for g in range(zeros.shape[0])] for row in range(n)]
    return weights(codes, points, tensors["scales"].T, tensors["g_idx"].tolist())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 32), (4, 96), (4, -1), (8, -1)])
def test_files_say_what_the_weights_are(bits: int, group: int, symmetric: bool, shuffled: bool, version: str) -> None:
    packed = random_groups(bits, 24, 192, group, symmetric=symmetric, shuffled=shuffled and group != -1)
    tensors = gptq.pack(packed, version)
    assert torch.equal(textbook(tensors, bits, version), packed.dequantize())
    assert same(gptq.unpack(tensors, bits, group, symmetric, version), packed)


def test_shapes_and_types_of_the_file() -> None:
    tensors = gptq.pack(random_groups(4, 288, 576, 64))
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    assert shapes == {
        "qweight": ((72, 288), torch.int32),
        "qzeros": ((9, 36), torch.int32),
        "scales": ((9, 288), torch.float16),
        "g_idx": ((576,), torch.int32),
    }
    assert all(t.is_contiguous() for t in tensors.values())


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    eights=st.integers(1, 9),
    groups=st.integers(1, 5),
    width=st.sampled_from([8, 24, 32, 40]),
    symmetric=st.booleans(),
    shuffled=st.booleans(),
    version=st.sampled_from(VERSIONS),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_there_and_back(
    bits: int,
    eights: int,
    groups: int,
    width: int,
    symmetric: bool,
    shuffled: bool,
    version: str,
    dtype: torch.dtype,
    seed: int,
) -> None:
    n, k = eights * 8, groups * width
    packed = random_groups(bits, n, k, width, symmetric=symmetric, shuffled=shuffled, dtype=dtype, seed=seed)
    tensors = gptq.pack(packed, version)
    again = gptq.unpack(tensors, bits, width, symmetric, version)
    assert torch.equal(again.dequantize(), packed.dequantize())
    assert again.scale.dtype == dtype
    repacked = gptq.pack(again, version)
    assert all(torch.equal(repacked[name], t) for name, t in tensors.items())


def test_version_1_cannot_hold_a_zero_point_of_0() -> None:
    packed = random_groups(4, 16, 64, 32, least=0)
    assert packed.zero is not None
    packed.zero[3, 1] = 0
    with pytest.raises(FormatError, match="gptq_v2"):
        gptq.pack(packed, "gptq")
    assert same(gptq.unpack(gptq.pack(packed, "gptq_v2"), 4, 32, False, "gptq_v2"), packed)


def test_a_version_1_zero_point_that_wrapped_is_0() -> None:
    tensors = gptq.pack(random_groups(4, 8, 32, 32), "gptq_v2")
    tensors["qzeros"][:] = -1  # fifteens
    assert gptq.unpack(tensors, 4, 32, False, "gptq").zero.eq(0).all()
    assert gptq.unpack(tensors, 4, 32, False, "gptq_v2").zero.eq(15).all()


@pytest.mark.parametrize("written", VERSIONS)
@pytest.mark.parametrize("read", VERSIONS)
def test_symmetric_files_do_not_depend_on_the_version(written: str, read: str) -> None:
    packed = random_groups(4, 16, 64, 32, symmetric=True)
    assert same(gptq.unpack(gptq.pack(packed, written), 4, 32, True, read), packed)


@pytest.mark.parametrize(
    "change", [lambda index: None, torch.zeros_like, lambda index: torch.full_like(index, -1)], ids=["none", "0", "-1"]
)
def test_files_without_a_group_index(change: Callable[[Tensor], Tensor | None]) -> None:
    packed = random_groups(4, 16, 96, 32)
    tensors = gptq.pack(packed)
    index = change(tensors.pop("g_idx"))
    if index is not None:
        tensors["g_idx"] = index
    assert same(gptq.unpack(tensors, 4, 32, False, "gptq"), packed)


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_last_group_that_is_shorter(shuffled: bool) -> None:
    """AutoGPTQ writes 576 columns in groups of 128 with half a group at the end."""
    tensors = gptq.pack(random_groups(4, 16, 160, 32))
    index = torch.arange(160, dtype=torch.int32) // 64
    tensors["g_idx"] = index[torch.randperm(160, generator=torch.Generator().manual_seed(0))] if shuffled else index
    tensors["scales"], tensors["qzeros"] = tensors["scales"][:3], tensors["qzeros"][:3]
    read = gptq.unpack(tensors, 4, 64, False, "gptq")
    assert read.group == 32
    assert torch.equal(read.dequantize(), textbook(tensors, 4, "gptq"))


def test_groups_of_any_sizes() -> None:
    tensors = gptq.pack(random_groups(4, 8, 64, 32))
    tensors["g_idx"] = torch.randint(0, 2, (64,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    assert torch.equal(gptq.unpack(tensors, 4, 32, False, "gptq").dequantize(), textbook(tensors, 4, "gptq"))


def broken(name: str, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    tensors = gptq.pack(random_groups(4, 16, 64, 32))
    tensors[name] = change(tensors[name])
    return tensors


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qweight", lambda t: t.float()),
        ("qweight", lambda t: t[:, :-1]),
        ("qzeros", lambda t: t[:, :-1]),
        ("scales", lambda t: t[:1]),
        ("g_idx", lambda t: t + 1),
        ("g_idx", lambda t: t[:-1]),
    ],
)
def test_files_that_do_not_match_are_refused(name: str, change: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(FormatError):
        gptq.unpack(broken(name, change), 4, 32, False, "gptq")


def test_the_configured_group_must_fit_the_scales() -> None:
    tensors = gptq.pack(random_groups(4, 16, 64, 16))
    del tensors["g_idx"]
    with pytest.raises(FormatError, match=r"64.*32.*4 scales"):
        gptq.unpack(tensors, 4, 32, False, "gptq")


def test_missing_tensors_are_named() -> None:
    with pytest.raises(FormatError, match="qzeros, scales"):
        gptq.unpack({"qweight": torch.zeros(8, 8, dtype=torch.int32)}, 4, 32, True, "gptq")


def test_sizes_that_fill_no_words_are_refused() -> None:
    with pytest.raises(FormatError, match="12 x 64"):
        gptq.pack(random_groups(4, 12, 64, 32))


def test_offsets_are_refused() -> None:
    packed = random_groups(4, 8, 32, 32)
    offset = GroupInt(4, 32, packed.codes, packed.scale, packed.scale, packed.zero)
    with pytest.raises(FormatError, match="GGUF"):
        gptq.pack(offset)


def test_other_widths_are_refused() -> None:
    with pytest.raises(FormatError, match="3-bit"):
        gptq.unpack(broken("g_idx", lambda t: t), 3, 32, True, "gptq")
