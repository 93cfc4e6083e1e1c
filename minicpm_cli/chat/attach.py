"""Text from files and pipes for a prompt: read strictly, quoted with its name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import BinaryIO

from minicpm_cli.disk import path_of as path_of
from minicpm_cli.errors import FileError, UsageError

_FENCE = re.compile(r"`{3,}")
_SURROGATES = re.compile("[\ud800-\udfff]")
CONVERT = "Convert it first (iconv -f ENCODING -t utf-8)."
MOST = 64 << 20  # bytes of a text
_HEAD = 8192  # bytes in which a zero tells a binary file, as for git
_PDF = re.compile(rb"%PDF-\d")  # which may have no other bytes than text has
_MAGIC = (
    (b"%PDF-", "PDF"),
    (b"\x89PNG", "PNG image"),
    (b"\xff\xd8\xff", "JPEG image"),
    (b"GIF8", "GIF image"),
    (b"PK\x03\x04", "zip, or an office document"),
    (b"\x1f\x8b", "gzip"),
    (b"\x7fELF", "program"),
    (b"GGUF", "GGUF model"),
)


def decode(data: bytes, name: str, encoding: str | None = None, *, cure: str = CONVERT) -> str:
    """Text, a BOM left out; UTF-8 unless the user named another `encoding`. `cure` is what to do about other text.

    Raises UsageError for a binary file, or naming the first byte that is no text.
    """
    kind = _kind(data, cure) if encoding is None and not _may_be_text(data) else None
    if kind:
        raise UsageError(f"{name} is {kind}")
    try:
        return data.decode(encoding or "utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        wanted = (encoding or "utf-8").upper()
        raise UsageError(
            f"{name} is not {wanted}: byte 0x{data[error.start]:02x} at offset {error.start}. {cure}"
        ) from None


def _may_be_text(data: bytes) -> bool:
    """A question may begin as files do: "GIF89a or PNG?"."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in data[:_HEAD] and not _PDF.match(data)


def _kind(data: bytes, cure: str) -> str | None:
    """What is no UTF-8 text, by how it begins. UTF-16 is text, and most of its bytes may be zeros."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return f"UTF-16 text. {cure}"
    found = next((kind for magic, kind in _MAGIC if data.startswith(magic)), None)
    if found or b"\0" in data[:_HEAD]:
        return f"a binary file{f' ({found})' if found else ''}. Only text can be put into a prompt."
    return None


def unicode(text: str) -> str:
    """Half surrogate pairs become replacement characters: JSON can hold them, and Python has bytes so that it kept."""
    return _SURROGATES.sub("\ufffd", text)


def bounded(stream: BinaryIO, name: str) -> bytes:
    """All that comes. Raises UsageError for what may never end, such as /dev/zero."""
    data = stream.read(MOST + 1)
    if len(data) > MOST:
        raise UsageError(f"{name} has more than {MOST >> 20} MiB, and no context holds as much text. Give a part.")
    return data


def read_text(path: Path, encoding: str | None = None, *, cure: str = CONVERT) -> str:
    """The text of a file, as `decode`. Raises FileError when it cannot be read."""
    try:
        with path_of(path).open("rb") as file:
            data = bounded(file, str(path))
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}. Check the name and its permissions.") from None
    return decode(data, str(path), encoding, cure=cure)


def quoted(name: str, text: str) -> str:
    """A file's text as a fenced block under its name; the fence is longer than any inside."""
    fence = "`" * (max((len(run) for run in _FENCE.findall(text)), default=2) + 1)
    return f"{name}:\n{fence}\n{text.removesuffix(chr(10))}\n{fence}"


def without_final_newline(text: str) -> str:
    """What `echo` adds at the end is taken away; spaces before it mean something and stay."""
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text
