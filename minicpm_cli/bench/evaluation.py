"""`minicpm eval`: a text in windows through a model, and through another one to compare it with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from minicpm_cli.bench import heldout, machine
from minicpm_cli.bench.quality import Perplexity, Reader, Remembered, Window, compare, perplexity, windows
from minicpm_cli.bench.quality_rows import QualityRow
from minicpm_cli.errors import OutOfMemory, UsageError
from minicpm_cli.hub.files import ModelFiles
from minicpm_cli.llm.checkpoint import Checkpoint
from minicpm_cli.llm.device import choose_device, choose_dtype, dtype_name, free_bytes
from minicpm_cli.model.decoder import Decoder
from minicpm_cli.model.kv_format import KVFormat
from minicpm_cli.model.load_scheme import AS_STORED
from minicpm_cli.model.shards import bin_files, safetensors_files
from minicpm_cli.settings import LoadOptions
from minicpm_cli.text.tokenizer import Tokenizer, load_tokenizer

USUAL_WINDOW = 2048

Progress = Callable[[str, int, int, str], None]  # (what, done, total, unit)


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """`text` and the `name` to call it by; without a text the held-out half of the built-in one.

    `window` None is 2048 or the context, `stride` None half a window; where neither these nor `bos` are given, the
    built-in text has its own six windows. `windows` bounds their number.
    """

    text: str | None = None
    name: str = ""
    window: int | None = None
    stride: int | None = None
    bos: bool = False
    windows: int | None = None

    def checked(self) -> EvalOptions:
        """Itself. Raises UsageError before anything is loaded."""
        for flag, value, least in (
            ("window", self.window, 2),
            ("stride", self.stride, 1),
            ("max-windows", self.windows, 1),
        ):
            if value is not None and value < least:
                raise UsageError(f"--{flag} is {value}; it must be at least {least}")
        if self.window and self.stride and self.stride > self.window - self.bos:
            raise UsageError(
                f"--stride {self.stride} would leave tokens out: it must be at most {self.window - self.bos}"
            )
        if self.text is not None and not self.text:
            raise UsageError(f"{self.name} is empty; there is nothing to predict")
        return self

    @property
    def own_windows(self) -> bool:
        return self.text is None and self.window is None and self.stride is None and not self.bos


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that is known but not loaded."""

    name: str
    checkpoint: Checkpoint
    tokenizer: Tokenizer

    @classmethod
    def read(cls, files: ModelFiles, load: LoadOptions) -> Candidate:
        """No weights are read. Raises UsageError for what `load` asks of a model that cannot give it."""
        checkpoint = Checkpoint.read(files.path).with_options(load)
        return cls(files.name, checkpoint, load_tokenizer(files.path))

    def load(self, load: LoadOptions, longest: int, progress: Progress) -> Decoder:
        """Opened for --ctx, else for windows of `longest` tokens: RoPE scaling that depends on length follows it."""
        checkpoint = replace(self.checkpoint, cfg=self.checkpoint.cfg.with_context(load.ctx or longest))
        device = choose_device(load.device)

        def layers(done: int, total: int) -> None:
            progress(f"loading {self.name}", done, total, "layers")

        with _memory_errors(self.name, device):
            return checkpoint.decoder(device, choose_dtype(load.dtype, device), layers)


@dataclass(frozen=True, slots=True)
class Passage:
    """A text cut into windows of at most `size` tokens, `stride` apart; None: spaced."""

    name: str
    windows: list[Window]
    size: int
    stride: int | None


def evaluate(
    model: Candidate, reference: Candidate | None, options: EvalOptions, load: LoadOptions, progress: Progress
) -> QualityRow:
    """Loads one model after the other. Raises UsageError, ModelError or DeviceError."""
    passage = cut(model, options, load)
    known = None
    if reference is not None:
        _check_alike(model, reference, passage, options, load)
        known = _remembered(reference, passage, load, progress)
    decoder = model.load(load, passage.size, progress)
    begun = time.monotonic()
    with _memory_errors(model.name, decoder.device):
        reader, told = Reader(decoder, _kv_format(load, decoder)), _reading(model.name, progress)
        if known is None:
            found = perplexity(reader, passage.windows, told)
            return _row(model, decoder, passage, options, load, found, time.monotonic() - begun)
        both = compare(reader, known, passage.windows, told)
    assert reference is not None
    row = _row(model, decoder, passage, options, load, Perplexity(both.ppl, both.tokens), time.monotonic() - begun)
    return replace(row, against=reference.name, ref_ppl=both.ref_ppl, kl=both.kl, top1=both.top1)


def cut(model: Candidate, options: EvalOptions, load: LoadOptions) -> Passage:
    """The text in windows of `model`'s tokens. Raises UsageError for one too short, or for too small a context."""
    tokenizer, room = model.tokenizer, load.ctx or model.checkpoint.cfg.context
    if options.own_windows:
        _check_room(model.name, heldout.SIZE, room)
        return Passage(heldout.name(), heldout.heldout(tokenizer)[: options.windows], heldout.SIZE, None)
    size = options.window or min(USUAL_WINDOW, room)
    _check_room(model.name, size, room)
    stride = options.stride or max(size // 2, 1)
    ids = heldout.tokens(tokenizer) if options.text is None else tokenizer.encode(options.text, control=False)
    found = windows(ids, size, stride, _bos(model) if options.bos else None)
    return Passage(options.name or heldout.name(), found[: options.windows], size, stride)


def _bos(model: Candidate) -> int:
    if model.tokenizer.bos_id is None:
        raise UsageError(f"{model.name} has no BOS token; leave --bos out")
    return model.tokenizer.bos_id


def _check_room(name: str, size: int, room: int) -> None:
    if size > room:
        raise UsageError(
            f"windows of {size} tokens do not fit the context of {name}, {room} tokens. "
            "Give a smaller --window, or a larger --ctx."
        )


def _check_alike(
    model: Candidate, reference: Candidate, passage: Passage, options: EvalOptions, load: LoadOptions
) -> None:
    """Raises UsageError where predictions cannot be compared token by token."""
    vocab, other = model.checkpoint.cfg.vocab, reference.checkpoint.cfg.vocab
    if vocab != other:
        raise UsageError(
            f"{model.name} cannot be compared with {reference.name}: their vocabularies have {vocab} and {other} tokens"
        )
    same = options if passage.stride is None else replace(options, window=passage.size, stride=passage.stride)
    if cut(reference, same, load).windows != passage.windows:
        raise UsageError(
            f"{model.name} cannot be compared with {reference.name}: their tokenizers cut the text into other tokens"
        )


def _remembered(reference: Candidate, passage: Passage, load: LoadOptions, progress: Progress) -> Remembered:
    """The reference is gone from memory afterwards, but for its head."""
    itemsize = choose_dtype(load.dtype, choose_device(load.device)).itemsize
    needed = sum(len(w.predicted) for w in passage.windows) * reference.checkpoint.cfg.hidden_size * itemsize
    free = free_bytes(torch.device("cpu"))
    if needed > free:
        raise OutOfMemory(
            f"what {reference.name} makes of this text takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free. "
            "Read less of it: --max-windows N."
        )
    decoder = reference.load(load, passage.size, progress)
    with _memory_errors(reference.name, decoder.device):
        return Remembered.of(decoder, passage.windows, _reading(reference.name, progress))


def _reading(name: str, progress: Progress) -> Callable[[int, int], None]:
    return lambda done, total: progress(f"reading with {name}", done, total, "windows")


def _kv_format(load: LoadOptions, decoder: Decoder) -> KVFormat:
    return KVFormat.of(load.kv_dtype, dtype_name(decoder.dtype))


def _row(
    model: Candidate,
    decoder: Decoder,
    passage: Passage,
    options: EvalOptions,
    load: LoadOptions,
    found: Perplexity,
    seconds: float,
) -> QualityRow:
    checkpoint = model.checkpoint
    scheme = _kv_format(load, decoder).beside(checkpoint.scheme(dtype_name(decoder.dtype)))
    size = None if checkpoint.load != AS_STORED else file_bytes(checkpoint.path)
    return QualityRow(
        setting=machine.setting_for(decoder.device, model.name, scheme),
        text=passage.name,
        windows=len(passage.windows),
        window=passage.size,
        stride=passage.stride,
        bos=options.bos,
        tokens=found.tokens,
        ppl=found.value,
        seconds=seconds,
        bytes=size,
        bits_per_weight=size and 8 * size / decoder.cfg.parameters,
    )


def file_bytes(path: Path) -> int:
    """Of the weights' files."""
    if path.is_file():
        return path.stat().st_size
    shards = safetensors_files(path) or bin_files(path)
    return sum(file.stat().st_size for file in (shards.files if shards else path.glob("*.gguf")))


@contextmanager
def _memory_errors(name: str, device: torch.device) -> Iterator[None]:
    """Turns torch's out-of-memory into ours."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemory(
            f"{name} ran out of memory on {device}. Give a smaller --window or --ctx, or a smaller model."
        ) from error
