"""The rows of an input that are still to be done, in its order and read lazily."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator
from dataclasses import replace

from minicpm_cli.batch.files import failed
from minicpm_cli.batch.job import Job
from minicpm_cli.batch.keys import HashSet, key_hash
from minicpm_cli.batch.lines import raw_lines, trimmed
from minicpm_cli.batch.options import BatchOptions
from minicpm_cli.batch.records import Kind, Row, in_shard, parse
from minicpm_cli.errors import FileError, RequestError


class PendingRows:
    """Rows of our shard that no earlier run has finished; `skipped` counts the others. One thread at a time.

    A line that cannot be run is a row with an error, and so is one whose id a stream repeats. Raises FileError at the
    end of an input that is no longer what it was when it was scanned.
    """

    def __init__(self, options: BatchOptions, job: Job) -> None:
        self._options, self._job = options, job
        self._seen = HashSet() if job.scan is None else None
        self.skipped = 0

    def read(self) -> Generator[Row]:
        """Closes a stream at its end: a pipe that another thread reads cannot be closed from outside."""
        try:
            for row in self._rows():
                if any(key_hash(key) in self._job.past.done for key in row.keys):
                    self.skipped += 1
                else:
                    yield row
        except OSError as e:
            raise failed("read", self._options.input, e) from e
        finally:
            if self._job.scan is None and self._options.input != "-":
                self._job.source.close()

    def _rows(self) -> Generator[Row]:
        kind: Kind = "simple"
        scan, end, digest = self._job.scan, 0, hashlib.sha256()
        size = None if scan is None else scan.size
        done, passed = _bits(self._job.done), None
        for number, offset, raw in raw_lines(self._job.source, size, stream=scan is None):
            end = offset + len(raw)
            if scan is not None:
                digest.update(raw)
            line = trimmed(number, offset, raw)
            if line is None:
                continue
            if next(done, False):
                self.skipped += in_shard(number, self._options.shard)
                passed = line
                continue
            if passed is not None:
                kind, passed = parse(passed, self._options.style, kind).kind, None
            row = parse(line, self._options.style, kind)
            kind = row.kind
            if self._seen is not None and row.named:
                row = _first_of_its_id(row, self._seen)
            if in_shard(number, self._options.shard):
                yield row
        if scan is not None and (end, digest.hexdigest()) != (scan.size, scan.sha256):
            what = "changed" if end == scan.size else f"cut to {end} of {scan.size} bytes"
            raise FileError(
                f"{self._options.input} was {what} while it was read. Put it back and run the same command again, or "
                "start again with --overwrite."
            )


def _bits(data: bytes) -> Iterator[int]:
    for byte in data:
        for place in range(7, -1, -1):
            yield byte >> place & 1


def _first_of_its_id(row: Row, seen: HashSet) -> Row:
    """A repeated id must not pass for the first row's: its error row goes by line number."""
    key = key_hash(row.key)
    if key not in seen:
        seen.add(key)
        return row
    error = RequestError("bad_parameter", f"the id {row.id!r} was used by an earlier line")
    return replace(row, id=row.line, named=False).failed(error)
