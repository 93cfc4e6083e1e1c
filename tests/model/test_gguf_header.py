"""The header parser against the gguf package's reader, and against files cut and bent in every way."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints import write_checkpoint
from minicpm_cli.errors import MinicpmError, WeightsError
from minicpm_cli.model.gguf_header import GGML_TYPES, Strings, read_header


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, body: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + body


def row(name: str, dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def make(pairs: list[bytes], rows: list[bytes], data: int = 256, version: int = 3, counts: Any = None) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(rows), len(pairs))))
    body = head + b"".join(pairs) + b"".join(rows)
    return body + bytes(-len(body) % 32) + bytes(data)


def written(folder: Path, raw: bytes) -> Path:
    path = folder / "x.gguf"
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize(
    ("family", "quant"), [("minicpm5-1b", "Q4_0"), ("minicpm3-4b", "Q8_0"), ("minicpm-2b", "BF16")]
)
def test_equals_the_gguf_reader(tmp_path: Path, family: str, quant: str) -> None:
    path = write_checkpoint(tmp_path, family, fmt="gguf", quant=quant)
    ours, theirs = read_header(path), gguf.GGUFReader(path)
    names = [n for n in theirs.fields if not n.startswith("GGUF.")]
    assert list(ours.metadata) == names
    for name in names:
        mine, value = ours.metadata[name], theirs.fields[name].contents()
        assert (list(mine) if isinstance(mine, Strings) else mine) == value, name
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for t in theirs.tensors:
        mine = ours.tensors[t.name]
        assert mine.shape == tuple(int(n) for n in reversed(t.shape))
        assert (mine.type, mine.offset, mine.nbytes) == (t.tensor_type.name, t.data_offset, t.n_bytes)


def test_block_sizes_are_ggmls() -> None:
    ours = {number: (name, block, size) for number, (name, block, size) in GGML_TYPES.items()}
    known = {int(t): (t.name, *sizes) for t, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert all(ours[number] == known[number] for number in ours.keys() & known.keys())
    assert not known.keys() - ours.keys()


def test_every_value_type(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    values = {"uint8": 200, "int8": -5, "uint16": 60000, "int16": -300, "uint32": 4_000_000_000, "int32": -70000}
    values |= {"float32": 0.5, "float64": 0.1, "bool": True, "string": "文字", "uint64": 2**63, "int64": -(2**62)}
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    for name, array in {
        "ints": [1, 2, 3],
        "floats": [0.5, -2.0],
        "bools": [True, False],
        "words": ["a", "é", ""],
    }.items():
        writer.add_array(f"x.{name}", array)
        values[name] = array  # type: ignore[assignment]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert {k: v for k, v in read_header(tmp_path / "v.gguf").metadata.items() if k.startswith("x.")} == {
        f"x.{k}": v for k, v in values.items()
    }


def test_strings_are_a_sequence(tmp_path: Path) -> None:
    body = struct.pack("<IQ", 8, 3) + text("a") + text("") + text("b\xff".encode("latin-1"))
    words = read_header(written(tmp_path, make([pair("w", 9, body)], []))).metadata["w"]
    assert (len(words), words[0], words[1:], list(words)) == (3, "a", ["", "b\ufffd"], ["a", "", "b\ufffd"])
    assert words == ["a", "", "b\ufffd"]
    assert words != ["a"]


def test_every_prefix_is_refused(tmp_path: Path) -> None:
    words = pair("w", 9, struct.pack("<IQ", 8, 2) + text("ab") + text("c"))
    numbers = pair("n", 9, struct.pack("<IQ3f", 6, 3, 1, 2, 3))
    raw = make([words, numbers, pair("s", 8, text("xyz"))], [row("a"), row("b", (32, 2), 8, 32)], data=32 + 68)
    assert set(read_header(written(tmp_path, raw)).tensors) == {"a", "b"}
    for size in range(len(raw)):
        with pytest.raises(WeightsError):
            read_header(written(tmp_path, raw[:size]))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 330), new=st.binary(min_size=1, max_size=9))
def test_bent_bytes_never_crash(tmp_path: Path, at: int, new: bytes) -> None:
    words = pair("w", 9, struct.pack("<IQ", 8, 2) + text("ab") + text("c"))
    raw = make([words, pair("general.alignment", 4, struct.pack("<I", 32))], [row("a"), row("b", (32, 2), 8, 32)])
    try:
        header = read_header(written(tmp_path, raw[:at] + new + raw[at + len(new) :]))
        list(header.metadata.get("w", []))
    except MinicpmError:
        pass


HUGE = 2**63
STRINGS = struct.pack("<IQ", 8, HUGE)
BAD = {
    "magic": (b"GGML" + bytes(40), "not a GGUF file"),
    "version 1": (make([], [], version=1), "version 1"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensor count": (make([], [], counts=(HUGE, 0)), f"{HUGE} tensors"),
    "pair count": (make([], [], counts=(0, HUGE)), f"{HUGE} metadata"),
    "array count": (make([pair("k", 9, struct.pack("<IQ", 6, HUGE))], []), "expects"),
    "string count": (make([pair("k", 9, STRINGS)], []), "expects"),
    "string length": (make([pair("k", 8, struct.pack("<Q", HUGE))], []), f"expects {HUGE} bytes"),
    "string in array": (make([pair("k", 9, struct.pack("<IQQ", 8, 1, 2**64 - 9))], []), "1 strings that do not end"),
    "nested array": (make([pair("k", 9, struct.pack("<IQ", 9, 1))], []), "unsupported value type 9"),
    "value type": (make([pair("k", 77, b"")], []), "unknown value type 77"),
    "double key": (make([pair("k", 0, b"a")] * 2, []), "appears twice"),
    "key not text": (make([text(b"\xff\xfe") + struct.pack("<IB", 0, 0)], []), "not text"),
    "dimensions": (make([], [text("a") + struct.pack("<I", 2**31)]), "dimensions"),
    "ggml type": (make([], [row("a", kind=99)]), "ggml type 99"),
    "removed ggml type": (make([], [row("a", kind=4)]), "ggml type 4"),
    "odd row": (make([], [row("a", (33,), 8)]), "multiple of 32"),
    "zero row": (make([], [row("a", (0,))]), "shape"),
    "huge shape": (make([], [row("a", (HUGE, HUGE))]), "expects"),
    "beyond the end": (make([], [row("a", (800,))], data=256), "expects 3264 bytes, the file has 320"),
    "unaligned": (make([], [row("a", offset=4)]), "multiple of the alignment 32"),
    "overlap": (make([], [row("a", (16,)), row("b", offset=32)]), "'a' and 'b' overlap"),
    "double tensor": (make([], [row("a"), row("a", offset=32)]), "appears twice"),
    "alignment": (make([pair("general.alignment", 4, struct.pack("<I", 24))], []), "power of two"),
    "alignment 0": (make([pair("general.alignment", 4, struct.pack("<I", 0))], []), "power of two"),
    "alignment text": (make([pair("general.alignment", 8, text("32"))], []), "power of two"),
    "split": (make([pair("split.count", 2, struct.pack("<H", 3))], []), "one of 3 parts"),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses(tmp_path: Path, case: str) -> None:
    raw, message = BAD[case]
    path = written(tmp_path, raw)
    with pytest.raises(WeightsError) as caught:
        read_header(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="cannot read"):
        read_header(tmp_path / "nothing.gguf")
    with pytest.raises(WeightsError, match="cannot read"):
        read_header(tmp_path)
    with pytest.raises(WeightsError, match="0 bytes"):
        read_header(written(tmp_path, b""))


def test_own_alignment_places_the_data(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_custom_alignment(128)
    writer.add_tensor("a", np.arange(3, dtype=np.float32))
    writer.add_tensor("b", np.arange(5, dtype=np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    header = read_header(tmp_path / "a.gguf")
    raw = (tmp_path / "a.gguf").read_bytes()
    for name, count in (("a", 3), ("b", 5)):
        t = header.tensors[name]
        assert t.offset % 128 == 0
        assert struct.unpack(f"<{count}f", raw[t.offset : t.offset + t.nbytes]) == tuple(range(count))


def test_a_large_vocabulary_is_quick(tmp_path: Path) -> None:
    """The gguf package takes over a second for this one; the limit leaves room for a busy machine."""
    import time

    tokens = struct.pack("<IQ", 8, 120_000) + b"".join(text(f"token{i}") for i in range(120_000))
    path = written(tmp_path, make([pair("tokenizer.ggml.tokens", 9, tokens)], []))
    start = time.process_time()
    header = read_header(path)
    assert time.process_time() - start < 0.25
    assert header.metadata["tokenizer.ggml.tokens"][119_999] == "token119999"


def test_planning_needs_no_torch() -> None:
    """`minicpm ls` and the tokenizer read headers; torch would cost them seconds."""
    code = "import sys, minicpm_cli.model.gguf; sys.exit('torch' in sys.modules or 'gguf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
