"""What a step allocates beside weights and cache, by phase, counted from the shapes. No torch here.

The tensors counted are those alive at the widest point of a block, of the sampled rows, and of a matrix on its way in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.shapes import EMBED, HEAD, is_linear, tensor_shapes

SCORE_COPIES = 6  # float32 rows of logits alive at once while sampling: scores, weights, float64 sums, masks
# Where kernels draw, counts alone; with those in Triton also two of lists and what penalties make of the logits. Where
# the host does, the logits in float32, what penalties or a mask make of them, and counts.
GPU_SCORE_COPIES = 4
FLOAT_ROWS = 8  # up to so many rows of logits come in float32
CUBLAS = 34 << 20  # bytes of torch's workspace for products on Hopper, of each stream that computes
PREFILL_GRAPH = 2048  # tokens of the longest prompt whose step is captured
ROTATION = 4 * 4  # bytes an element of the rotary angles: the angle, sine and cosine in float32, one on its way
ROUNDING = 16  # bytes a weight of a matrix that is quantized as it is loaded
MERGING = 8  # bytes a weight of a matrix that an adapter is merged into: in float32, and the factors' product


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes at the peak of each phase, beyond weights and cache. `capture` stays as long as the graphs do."""

    load: int
    capture: int
    prefill: int
    decode: int

    @property
    def running(self) -> int:
        """At the most, once the model is loaded."""
        return self.capture + max(self.prefill, self.decode)


@dataclass(frozen=True, slots=True)
class Form:
    """How a model lies in memory, as far as steps depend on it: bytes of an activation; are matrices packed?"""

    itemsize: int = 2
    packed: bool = False  # some are unpacked for products of many rows
    rounded: bool = False  # quantized while loading
    merged: bool = False  # with an adapter
    cpu: bool = False


PLAIN = Form()


def workspace(cfg: ModelConfig, tokens: int, seqs: int, form: Form, *, graphs: bool = False) -> Workspace:
    """Of steps of up to `tokens` tokens for `seqs` sequences; `graphs`: the decode steps are captured."""
    return Workspace(
        load=_load(cfg, form),
        capture=_capture(cfg, seqs, form) if graphs else 0,
        prefill=step_bytes(cfg, tokens, seqs, form),
        decode=step_bytes(cfg, seqs, seqs, form),
    )


def step_bytes(cfg: ModelConfig, tokens: int, seqs: int, form: Form) -> int:
    """Of one step: its block or its sampling, whichever is more."""
    block = tokens * _block_bytes(cfg, form) + _scratch(cfg, form)
    copies = SCORE_COPIES if form.cpu else GPU_SCORE_COPIES
    sampling = seqs * (cfg.vocab * (4 * copies + form.itemsize) + 2 * cfg.hidden_size * form.itemsize)
    fixed = 0 if form.cpu else CUBLAS
    return fixed + tokens * cfg.rope.dim * ROTATION // 2 + max(block, sampling)


def _block_bytes(cfg: ModelConfig, form: Form) -> int:
    """A token's activations in the wider half of a block."""
    stream = cfg.hidden_size * (2 if form.cpu else 1)  # products on a GPU add to it in place
    return form.itemsize * (stream + max(_attention(cfg), _mlp(cfg)))


def _attention(cfg: ModelConfig) -> int:
    """Elements: the normed input, queries, keys, values and what attention gives."""
    if cfg.mla is None:
        return cfg.hidden_size + (2 * cfg.heads + 2 * cfg.kv_heads) * cfg.head_dim
    mla = cfg.mla
    plain = 2 * mla.nope_dim + mla.rope_dim  # as projected, and its part without rotation in the order of the heads
    queries = cfg.heads * (plain + mla.kv_rank + mla.latent)  # absorbed, and joined with the rotated part
    return cfg.hidden_size + mla.q_rank + mla.latent + queries


def _mlp(cfg: ModelConfig) -> int:
    """Elements: the normed input, gate and up, and their product; of an expert, for the tokens that chose it."""
    active = cfg.moe.active if cfg.moe else 1
    return cfg.hidden_size + active * (3 * cfg.intermediate + (cfg.hidden_size if cfg.moe else 0))


def _scratch(cfg: ModelConfig, form: Form) -> int:
    """The widest matrix, unpacked for a product."""
    return form.itemsize * _widest(cfg) if form.packed else 0


def _widest(cfg: ModelConfig) -> int:
    """Weights of the largest matrix of a block: gate and up are one."""
    return 2 * cfg.hidden_size * cfg.intermediate


def _load(cfg: ModelConfig, form: Form) -> int:
    """The largest matrix of a block beside the place that it is copied to; on a GPU all experts of one, stacked."""
    shapes = tensor_shapes(cfg)
    largest = max(math.prod(shape) for name, shape in shapes.items() if is_linear(name))
    passing = largest * ((ROUNDING if form.rounded else form.itemsize) + (MERGING if form.merged else 0))
    if cfg.moe is None or form.cpu:
        return passing
    stacked = 3 * cfg.moe.experts * cfg.hidden_size * cfg.intermediate * form.itemsize
    return passing + (stacked // 4 if form.packed else stacked)


def _capture(cfg: ModelConfig, seqs: int, form: Form) -> int:
    """The pool of the captured steps, which share the activations of the largest one and a stream of their own."""
    block = max(seqs, PREFILL_GRAPH) * _block_bytes(cfg, form) + _scratch(cfg, form)
    return CUBLAS + block + cfg.vocab * max(min(seqs, FLOAT_ROWS) * 4, seqs * form.itemsize)


def ends_bytes(cfg: ModelConfig, itemsize: int) -> int:
    """Embedding and head, which are placed first and at that moment lie there twice."""
    shapes = tensor_shapes(cfg)
    return sum(math.prod(shapes[name]) * itemsize for name in (EMBED, HEAD) if name in shapes)
