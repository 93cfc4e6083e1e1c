"""Quantizations of tiny checkpoints, set up without a command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minicpm_cli.bench.quality import Comparison, Predictor, Window, compare
from minicpm_cli.hub.files import ModelFiles
from minicpm_cli.hub.identity import identity
from minicpm_cli.llm.checkpoint import Checkpoint
from minicpm_cli.llm.prompter import Prompter
from minicpm_cli.model.decoder import Decoder
from minicpm_cli.model.loader import load_model
from minicpm_cli.quantize.plan import Machine
from minicpm_cli.quantize.recipe import Recipe
from minicpm_cli.quantize.run import Job
from minicpm_cli.settings import LoadOptions

MACHINE = Machine("cpu", itemsize=4, chunk=2048, free=1 << 40, host_free=1 << 40, disk_free=1 << 40)
TEXT = "the hello world and you or re st at on in " * 400


@dataclass(frozen=True)
class Windows:
    """Random held-out windows."""

    name: str
    windows: Sequence[Window]

    @classmethod
    def of(cls, vocab: int, rows: int = 2, length: int = 24) -> Windows:
        ids = torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(5))
        return cls("random", [Window(tuple(row)) for row in ids.tolist()])

    def compare(self, model: Predictor, reference: Predictor) -> Comparison:
        return compare(model, reference, list(self.windows))


def job_of(path: Path, target: Path, *, machine: Machine = MACHINE, judged: bool = True, **recipe: Any) -> Job:
    """On the CPU in float32; a text file beside the model calibrates unless the recipe says otherwise."""
    text = path.with_name("calibration.txt")
    text.write_text(TEXT, encoding="utf-8")
    wanted = Recipe(**({"group": 32, "calib": str(text), "samples": 40, "seqlen": 32} | recipe))
    files = ModelFiles(path.name, path)
    prompter = Prompter.open(LoadOptions(), files)
    return Job(
        name=path.name,
        path=path,
        target=target,
        recipe=wanted,
        prompter=prompter,
        device=torch.device("cpu"),
        dtype=torch.float32,
        identity=identity(files, path.parent),
        machine=machine,
        judge=Windows.of(prompter.checkpoint.cfg.vocab) if judged else None,
    )


def silent(phase: str, done: int, total: int, detail: str) -> None:
    """Hears of progress and says nothing."""


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_model(path, Checkpoint.read(path).cfg, torch.device("cpu"), dtype)


def plain_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a quantized folder as plain weights, by their names in a plain one."""
    from minicpm_cli.model.shapes import tensor_shapes
    from minicpm_cli.model.source import open_source

    cfg = Checkpoint.read(path).cfg
    source = open_source(path, cfg)
    found = {name: source.take(name, shape) for name, shape in tensor_shapes(cfg).items()}
    return {name: t if isinstance(t, Tensor) else t.dequantize() for name, t in found.items()}
