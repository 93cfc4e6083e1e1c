"""A repository's headers without its weights: what a plan needs, at a few kilobytes instead of gigabytes.

The headers are laid out as in the whole files, of which the rest is a hole: whoever reads headers reads them as usual.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from minicpm_cli.errors import FileError, MinicpmError, ModelNotFound, WeightsError
from minicpm_cli.hub import repo
from minicpm_cli.hub.contents import RepoName
from minicpm_cli.hub.files import ModelFiles

MAX_HEADER = 100_000_000  # bytes of a safetensors header, the format's own limit
FIRST = 1 << 16  # bytes asked of a file at first: most headers are shorter
GGUF_FIRST = 1 << 24  # of a .gguf file, whose header holds the vocabulary
TIMEOUT = 30.0  # seconds without a byte
_WEIGHTS = (".safetensors", ".bin")


@dataclass(frozen=True, slots=True)
class Outline:
    """`files.path` is a folder or .gguf file with headers only; `nbytes` what fetching the model would bring."""

    files: ModelFiles
    nbytes: int


@contextmanager
def outline(name: RepoName) -> Iterator[Outline]:
    """The outline of a repository, kept as long as the block runs. Raises ModelNotFound or WeightsError."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise ModelNotFound(f"{name.text} is not in the cache, and HF_HUB_OFFLINE is set, so its size cannot be known")
    with TemporaryDirectory(prefix="minicpm-plan-") as folder:
        try:
            found = _laid_out(name, Path(folder))
        except MinicpmError:
            raise
        except Exception as error:
            if not isinstance(error, repo.expected()):
                raise
            found = Outline(repo.after(error, name), 0)
        yield found


def _laid_out(name: RepoName, folder: Path) -> Outline:
    from huggingface_hub import HfApi

    info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
    sizes = {s.rfilename: s.size or 0 for s in info.siblings or []}
    wanted = name.wanted(sizes)
    for file in wanted:
        place = folder / Path(file).name
        if file.endswith(_WEIGHTS):
            head = _safetensors_head(name, file, sizes[file]) if file.endswith(".safetensors") else b""
            _write(place, head, sizes[file])
        elif file.endswith(".gguf"):
            _write(place, _part(name, file, min(GGUF_FIRST, sizes[file])), sizes[file])
        elif file.endswith(".json") and not file.startswith("tokenizer"):
            _write(place, _part(name, file, sizes[file]), sizes[file])
    path = folder / Path(name.file).name if name.file else folder
    return Outline(ModelFiles(name.text, path, info.sha), sum(sizes[file] for file in wanted))


def _safetensors_head(name: RepoName, file: str, size: int) -> bytes:
    """The length of the header, and the header."""
    head = _part(name, file, min(FIRST, size))
    if len(head) < 8:
        raise WeightsError(f"{name.repo}: {file} has {len(head)} bytes, which is no safetensors file")
    end = 8 + struct.unpack("<Q", head[:8])[0]
    if end > min(size, MAX_HEADER):
        raise WeightsError(f"{name.repo}: the header of {file} expects {end} bytes, the file has {size}")
    return head[:end] if end <= len(head) else _part(name, file, end)


def _part(name: RepoName, file: str, count: int) -> bytes:
    """The first `count` bytes of a file; no more are read, even from a server that would send all of it."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    if not count:
        return b""
    headers = build_hf_headers() | {"Range": f"bytes=0-{count - 1}", "Accept-Encoding": "identity"}
    url = hf_hub_url(name.repo, file, revision=name.revision)
    found = bytearray()
    with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT) as response:
        hf_raise_for_status(response)
        for chunk in response.iter_raw():
            found += chunk
            if len(found) >= count:
                break
    if len(found) < count:
        raise WeightsError(f"{name.repo}: {file} broke off after {len(found)} of {count} bytes; try again")
    return bytes(found[:count])


def _write(path: Path, head: bytes, size: int) -> None:
    try:
        with open(path, "wb") as file:
            file.write(head)
            file.truncate(max(size, len(head)))
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror or error}") from error
