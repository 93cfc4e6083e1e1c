"""What a batch run is asked to do, and the checks that need neither the input nor a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minicpm_cli.batch.files import STREAM, files_beside, same_file
from minicpm_cli.batch.manifest import manifest_path
from minicpm_cli.batch.records import Fill, Style
from minicpm_cli.errors import FileError, UsageError
from minicpm_cli.types import check_sampling


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """`input` and `output` are paths or '-'. `shard` (i, n) takes the lines whose number leaves the rest i (mod n).

    `model` holds JSON values that say which model is asked for and how it is loaded (name, quantize, ...); `identify`
    tells which one the name stands for at the moment (commit, or files), empty while nothing is known because nothing
    has been fetched. A resume with other values is refused. `sampling` overrides the model's defaults. `fill` makes
    (system prompt, prompt) of a simple line, as `template` says in JSON values. Without `progress` nothing is written
    to stderr, and no bar if `plain`.
    """

    input: str
    output: str
    model: Mapping[str, Any] = field(default_factory=dict)
    identify: Callable[[], Mapping[str, Any]] = dict
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    system: str | None = None
    raw: bool = False
    keep_input: bool = False
    ordered: bool = False
    retry_errors: bool = False
    overwrite: bool = False
    force: bool = False
    fill: Fill | None = None
    template: Mapping[str, Any] | None = None
    shard: tuple[int, int] | None = None
    summary: str | None = None
    progress: bool = True
    plain: bool = False

    @property
    def style(self) -> Style:
        return Style(self.raw, self.system, self.keep_input, self.fill)

    @property
    def parameters(self) -> dict[str, Any]:
        """What shapes the answers beside the model, as JSON values."""
        given = {k: list(v) if isinstance(v, tuple) else v for k, v in self.overrides.items()}
        if self.template is not None:
            given["template"] = dict(self.template)
        return given | {"system": self.system, "raw": self.raw, "keep_input": self.keep_input}

    @property
    def overrides(self) -> dict[str, Any]:
        """The checked sampling parameters without the seed, which is each row's own."""
        return {k: v for k, v in check_sampling(self.sampling).items() if k != "seed"}

    @property
    def shard_name(self) -> str | None:
        return None if self.shard is None else f"{self.shard[0] % self.shard[1]}/{self.shard[1]}"

    @property
    def given_seed(self) -> int | None:
        given = check_sampling({"seed": self.seed if self.seed is not None else self.sampling.get("seed")})
        return given.get("seed")


def parse_shard(text: str) -> tuple[int, int]:
    """'i/n' as numbers. Raises UsageError."""
    parts = text.split("/")
    if len(parts) != 2 or not all(p.isascii() and p.isdecimal() and len(p) < 10 for p in parts):
        raise UsageError(f"--shard is {text!r}; it must be i/n, for example 1/4")
    shard = int(parts[0]), int(parts[1])
    _check_shard(shard)
    return shard


def check_options(options: BatchOptions) -> None:
    """Raises UsageError or FileError for whatever can be known by now."""
    _ = options.overrides, options.given_seed
    if options.shard is not None:
        _check_shard(options.shard)
    if options.overwrite and options.retry_errors:
        raise UsageError("--overwrite starts again and --retry-errors goes on; give one of them")
    if options.raw and options.system is not None:
        raise UsageError("--raw sends prompts without a template, so --system has no place; give one of them")
    for kind, name in (("input", options.input), ("output", options.output), ("summary", options.summary)):
        if name is not None and (not name or "\0" in name):
            raise UsageError(f"The {kind} {name!r} is no name of a file.")
    _check_input(options.input)
    _check_output(options.output)
    _check_distinct(options)


def _check_shard(shard: tuple[int, int]) -> None:
    i, n = shard
    if n < 1 or not 0 <= i <= n:
        raise UsageError(f"--shard is {i}/{n}; it must be i/n with i from 0 to n (0 and n are the same shard)")


def _check_input(name: str) -> None:
    if name == STREAM:
        return
    if not os.path.exists(name):
        raise FileError(f"The input {name} does not exist. Give a file of JSON lines, or - for standard input.")
    if os.path.isdir(name):
        raise FileError(f"The input {name} is a folder. Give a file of JSON lines.")
    if not os.access(name, os.R_OK):
        raise FileError(f"The input {name} cannot be read. Check its permissions.")


def _check_output(name: str) -> None:
    if name == STREAM:
        return
    if os.path.isdir(name):
        raise FileError(f"The output {name} is a folder. Give the name of a file.")
    folder = Path(os.path.realpath(name)).parent
    if not folder.is_dir():
        raise FileError(f"The folder of the output {name} does not exist. Create it first.")
    if not os.access(name if os.path.exists(name) else folder, os.W_OK):
        raise FileError(f"The output {name} cannot be written. Check its permissions.")


def _check_distinct(options: BatchOptions) -> None:
    if same_file(options.input, options.output):
        raise UsageError(f"OUT {options.output} is the input itself; its lines would be mixed with the answers.")
    out = Path(os.path.realpath(options.output))
    manifest = manifest_path(out)
    own = [str(path) for path in (manifest, *files_beside(out), *files_beside(manifest))]
    if options.output != STREAM and os.path.realpath(options.input) in own:
        raise UsageError(f"The input {options.input} is a file that the run writes beside OUT. Give another OUT.")
    if options.summary is None:
        return
    if not Path(os.path.realpath(options.summary)).parent.is_dir() or os.path.isdir(options.summary):
        raise FileError(f"The summary {options.summary} cannot be written there. Give a file in an existing folder.")
    taken = [os.path.realpath(options.input), str(out), *own]
    if os.path.realpath(options.summary) in taken or same_file(options.summary, options.input):
        raise UsageError(f"--summary {options.summary} is one of the run's own files. Give another name.")
