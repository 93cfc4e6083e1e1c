"""Everything a run needs before a model loads, opened and checked in the order that refuses without touching OUT."""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from minicpm_cli.batch.files import STREAM, Lock, failed, forget_aside, is_plain
from minicpm_cli.batch.journal import Journal, Output, Past, StreamOutput, recover
from minicpm_cli.batch.keys import line_key
from minicpm_cli.batch.manifest import (
    Manifest,
    fingerprint,
    manifest_path,
    new_seed,
    read_manifest,
    refuse_another_model,
    refuse_changes,
)
from minicpm_cli.batch.options import BatchOptions, check_options
from minicpm_cli.batch.order import restore_order
from minicpm_cli.batch.scan import Scan, scan_input
from minicpm_cli.errors import UsageError


@dataclass(frozen=True, slots=True)
class Job:
    """`scan` is None for a stream; `journal`, the real path of OUT, and `manifest` when OUT is no regular file.

    `done` has a bit for each line of a file that is not blank: whether an earlier run has finished it. Where it says
    no, `past` has the last word.
    """

    source: BinaryIO
    output: Output
    seed: int
    scan: Scan | None = None
    journal: Path | None = None
    manifest: Manifest | None = None
    past: Past = field(default_factory=Past)
    done: bytes = b""


@contextmanager
def open_job(options: BatchOptions) -> Iterator[Job]:
    """Raises UsageError, FileError. On leaving, OUT is whole, on disk, with --ordered in order, and its lock free."""
    check_options(options)
    out = _journal_path(options.output)
    with ExitStack() as held:
        if out is not None:
            held.callback(Lock(out).release)
            forget_aside(out)
            forget_aside(manifest_path(out))
        with ExitStack() as stack:
            job = _stream_job(options, stack) if out is None else _file_job(options, out, stack)
            yield job
        if options.ordered and out and job.scan and job.past.ok:
            restore_order(out, Path(options.input), job.scan.size)


def record_model(job: Job, options: BatchOptions) -> None:
    """Writes down which model was opened, fetched only now perhaps. Raises UsageError if OUT holds another's rows."""
    if job.manifest is None or job.journal is None:
        return
    opened = replace(job.manifest, files=dict(options.identify()))
    if opened == job.manifest:
        return
    if not options.force:
        refuse_another_model(job.manifest, opened, job.journal)
    opened.write(manifest_path(job.journal))


def _journal_path(name: str) -> Path | None:
    """The real path of OUT, so that all of its names share one manifest; None for '-', pipes and devices."""
    if name == STREAM or (os.path.exists(name) and not is_plain(name)):
        return None
    return Path(os.path.realpath(name))


def _stream_job(options: BatchOptions, stack: ExitStack) -> Job:
    source, scan = _open_source(options, stack)
    seed = options.given_seed if options.given_seed is not None else new_seed()
    if options.output == STREAM:
        if sys.stdout is None:
            raise UsageError("There is no standard output to write to. Give a file.")
        output = StreamOutput(sys.stdout.buffer, "standard output", owned=False)
    else:
        output = StreamOutput(_opened(options.output, "wb"), options.output, owned=True)
    stack.callback(output.close)
    return Job(source, output, seed, scan)


def _file_job(options: BatchOptions, out: Path, stack: ExitStack) -> Job:
    old = None if options.overwrite else _old_manifest(out, options)
    source, scan = _open_source(options, stack, None if old is None else old.input_bytes)
    manifest = _manifest(options, old, scan)
    if old is not None and not options.force:
        refuse_changes(old, manifest, scan, out)
    past = _past(options, out, scan)
    if manifest != old:
        manifest.write(manifest_path(out))
    journal = Journal(out)
    stack.callback(journal.close)
    if scan is None:
        return Job(source, journal, manifest.seed, None, out, manifest, past)
    done, scan = past.done.flags(scan.keys), replace(scan, keys=array("Q"))
    return Job(source, journal, manifest.seed, scan, out, manifest, past, done)


def _old_manifest(out: Path, options: BatchOptions) -> Manifest | None:
    """None when OUT holds nothing yet, or nothing is known of it and --force says to go on."""
    if not out.exists() or out.stat().st_size == 0:
        return None
    path = manifest_path(out)
    if options.force and not path.exists():
        return None
    old = read_manifest(path)
    if old is None:
        raise UsageError(
            f"{out} already holds something and has no {path.name}, so nothing is known of its rows. "
            "Give another OUT, start again with --overwrite, or append to it with --force."
        )
    return old


def _manifest(options: BatchOptions, old: Manifest | None, scan: Scan | None) -> Manifest:
    seed = options.given_seed
    if seed is None:
        seed = _seed(options, scan) if old is None else old.seed
    files = dict(options.identify()) or (old.files if old else {})
    return Manifest(dict(options.model), options.parameters, options.shard_name, seed, fingerprint(scan), files=files)


def _seed(options: BatchOptions, scan: Scan | None) -> int:
    """Shards of one input agree without being told: theirs is the input's."""
    return new_seed() if options.shard is None or scan is None else int(scan.sha256[:8], 16)


def _past(options: BatchOptions, out: Path, scan: Scan | None) -> Past:
    """An overwritten file is emptied before its new manifest is written: the old rows never meet it.

    A line that was cut short when the last run read it has its error dropped, and is run whole.
    """
    if options.overwrite or not out.exists():
        _opened(str(out), "wb").close()
        return Past()
    redo = None if scan is None or scan.grown_line is None else line_key(scan.grown_line)
    return recover(out, drop_errors=options.retry_errors, lenient=options.force, redo=redo)


def _open_source(options: BatchOptions, stack: ExitStack, mark: int | None = None) -> tuple[BinaryIO, Scan | None]:
    """A file is scanned and then read through the same handle: it may be replaced meanwhile. See `PendingRows` for who
    closes a stream.
    """
    if options.input == STREAM:
        return _standard_input(), None
    source = _opened(options.input, "rb")
    if not is_plain(options.input):
        return source, None
    stack.callback(source.close)
    return source, scan_input(source, Path(options.input), options.shard, mark)


def _standard_input() -> BinaryIO:
    """Through a reader of our own: at exit Python waits for the lock of its own, which a blocked thread may hold."""
    if sys.stdin is None:
        raise UsageError("There is no standard input to read from. Give a file.")
    try:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    except (AttributeError, OSError, ValueError):
        return sys.stdin.buffer


def _opened(name: str, mode: str) -> BinaryIO:
    try:
        return open(name, mode)  # type: ignore[return-value]
    except OSError as e:
        raise failed("open", name, e) from e
