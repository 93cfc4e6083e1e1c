"""What is measured of a model's operations: at its sizes, with the bytes or operations that each cannot do without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from minicpm_cli.bench.kernels import Call, Case, Make
from minicpm_cli.bench.weights import RandomSource
from minicpm_cli.kernels.batch import ForwardBatch
from minicpm_cli.kernels.cache import LayerCache, beside, encode
from minicpm_cli.kernels.ops import ops_for
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.load_scheme import LoadScheme
from minicpm_cli.model.mlp import make_mlp
from minicpm_cli.model.quantizing_source import QuantizingSource
from minicpm_cli.model.shapes import HEAD, is_absorbed, is_linear, tensor_shapes
from minicpm_cli.model.weights import Weights
from quant.layers.plain import ROWS as BLOCK
from quant.linear import Linear, make_linear
from quant.rtn import rtn

PAGE = 16
COLD = 400_000_000  # bytes that a chain of operations goes through, several times what a cache holds
TOKENS = 8192  # of a full prefill step
LENGTHS = ((1, 2048), (64, 640))  # sequences that decode, and the tokens of each
PROMPTS = ((1, 2048), (16, 512))
HEAD_BITS = {None: 16, "w8": 8, "w4": 4}
CACHES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
ROWS = (1, 8, 64)  # of the activations that small products multiply


def makers(
    cfg: ModelConfig, device: torch.device, dtype: torch.dtype, folder: Path | None = None
) -> Iterator[tuple[str, Make]]:
    """What to measure, by name; nothing is allocated before it is asked for. Compiled kernels are kept in `folder`."""
    model = Sizes(cfg, device, dtype, folder)
    for scheme in HEAD_BITS:
        yield f"products {scheme or 'plain'}", partial(model.products, scheme)
    for scheme in HEAD_BITS:
        yield f"head {scheme or 'plain'}", partial(model.head, scheme)
    yield "products of a prefill", model.prefill_products
    if cfg.moe:
        for scheme in HEAD_BITS:
            yield f"experts {scheme or 'plain'}", partial(model.experts, scheme)
    for name in (None, *CACHES):
        for count, length in LENGTHS:
            yield f"decode attention {name or 'plain'}", partial(model.decode, name, count, length)
    for count, length in PROMPTS:
        yield "prefill attention", partial(model.prefill, count, length)
    yield "norm", model.norm
    yield "gate", model.gate
    if cfg.mla is None:
        yield "rope and store", model.rope_store
    if device.type == "cuda":
        yield "sampling", model.sampling


class Product(NamedTuple):
    """A layer over a [rows, columns] matrix."""

    layer: Linear
    rows: int
    columns: int


class Sizes:
    """Makes the cases of a model."""

    def __init__(self, cfg: ModelConfig, device: torch.device, dtype: torch.dtype, folder: Path | None = None) -> None:
        self.cfg, self.device, self.dtype, self.folder = cfg, device, dtype, folder
        self.ops = ops_for(device)
        self.generator = torch.Generator(device)  # a capture that fails leaves the device's own unusable
        self.key_heads, self.width = (1, cfg.mla.latent) if cfg.mla else (cfg.kv_heads, cfg.head_dim)
        self.row_heads = 1 if cfg.mla else 2 * cfg.kv_heads  # of a token in the cache

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype, generator=self.generator)

    def products(self, scheme: str | None) -> list[Case]:
        """Those of some blocks, one after the other; the weights' bytes count."""
        chain = self._chain(scheme)
        size = sum(product.layer.nbytes for product in chain) / len(chain)
        return [Case(f"products {scheme or 'plain'}, {t} rows", "GB/s", size, self._calls(chain, t)) for t in ROWS]

    def _calls(self, chain: list[Product], rows: int) -> list[Call]:
        inputs = {k: self.random(rows, k) for k in {product.columns for product in chain}}
        return [partial(product.layer, inputs[product.columns]) for product in chain]

    def prefill_products(self) -> list[Case]:
        chain = self._chain(None)
        work = 2.0 * TOKENS * sum(product.rows * product.columns for product in chain) / len(chain)
        return [Case(f"products plain, {TOKENS} rows", "TFLOP/s", work, self._calls(chain, TOKENS))]

    def head(self, scheme: str | None) -> list[Case]:
        parts = [(HEAD, self.cfg.vocab, self.cfg.hidden_size)]
        first = self._product(parts, scheme).layer
        layers = [first, *(self._product(parts, scheme).layer for _ in range(COLD // first.nbytes))]
        calls = [partial(layer, self.random(1, self.cfg.hidden_size)) for layer in layers]
        return [Case(f"head {scheme or 'plain'}, 1 row", "GB/s", first.nbytes, calls)]

    def _chain(self, scheme: str | None) -> list[Product]:
        """The products of as many blocks as are cold."""
        block = self._block()
        plain = sum(n * k for group in block for _, n, k in group) * self.dtype.itemsize
        packed = plain // 4 if scheme == "w4" else plain // 2 if scheme == "w8" else plain
        return [self._product(group, scheme) for _ in range(max(1, COLD // packed)) for group in block]

    def _block(self) -> list[list[tuple[str, int, int]]]:
        """(name, N, K) of the first block's matrices, those that one product computes together; experts are apart."""
        groups: dict[str, list[tuple[str, int, int]]] = {}
        joined = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
        for name, shape in tensor_shapes(replace(self.cfg, layers=1)).items():
            if not is_linear(name) or is_absorbed(name) or ".experts." in name:
                continue
            kind = name.split(".")[-2]
            groups.setdefault(joined.get(kind, kind), []).append((name, shape[0], shape[1]))
        return list(groups.values())

    def _product(self, parts: list[tuple[str, int, int]], scheme: str | None) -> Product:
        load = LoadScheme.of(scheme, HEAD_BITS[scheme])
        stored = []
        for name, n, k in parts:
            weight, kind = self.random(n, k), load.matrix(name, k)
            stored.append(rtn(weight, kind) if kind else weight)
        layer = make_linear(stored, self.device, self.dtype, self.folder)
        return Product(layer, sum(n for _, n, _ in parts), parts[0][2])

    def experts(self, scheme: str | None) -> list[Case]:
        """A block's mixture: of the experts' bytes, those of the active ones for a row, nearly all for many."""
        assert self.cfg.moe is not None
        cfg, load = replace(self.cfg, layers=1), LoadScheme.of(scheme, 16)
        drawn = RandomSource(cfg, device=self.device, dtype=self.dtype)
        source = QuantizingSource(drawn, load, self.device) if scheme else drawn
        weights = Weights(source, self.device, self.dtype, kernels=self.folder)
        mixture = make_mlp(cfg, weights, "model.layers.0.mlp", self.ops)
        cases = []
        for rows in ROWS:
            seen = 1 - (1 - self.cfg.moe.active / self.cfg.moe.experts) ** rows
            calls = [partial(mixture, self.random(rows, cfg.hidden_size)) for _ in range(8)]
            cases.append(Case(f"experts {scheme or 'plain'}, {rows} rows", "GB/s", seen * weights.nbytes, calls))
        return cases

    def decode(self, stored: str | None, count: int, length: int) -> list[Case]:
        """One new token for each of `count` sequences; the bytes of their cache count."""
        scale_bytes = 2 if stored else 0
        dtype = CACHES[stored] if stored else self.dtype
        size = count * length * self.row_heads * (self.width * dtype.itemsize + scale_bytes)
        caches = [self._cache(count, length, stored) for _ in range(max(1, min(self.cfg.layers, COLD // size)))]
        batch = paged_batch(count, 1, length, self.device)
        q = self.random(count, self.cfg.heads, self.width)
        calls = [partial(self.ops.attend, q, cache, batch, self.cfg.attention_scale) for cache in caches]
        return [Case(f"decode attention {stored or 'plain'}, {count} x {length}", "GB/s", size, calls)]

    def prefill(self, count: int, length: int) -> list[Case]:
        """All of their tokens are new: half of the scores are computed."""
        batch, values = (
            paged_batch(count, length, length, self.device),
            self.cfg.mla.kv_rank if self.cfg.mla else self.width,
        )
        q, cache = self.random(count * length, self.cfg.heads, self.width), self._cache(count, length, None)
        work = float(count) * length * length * self.cfg.heads * (self.width + values)
        call = partial(self.ops.attend, q, cache, batch, self.cfg.attention_scale)
        return [Case(f"prefill attention, {count} x {length}", "TFLOP/s", work, [call])]

    def _cache(self, count: int, length: int, stored: str | None) -> LayerCache:
        pages = 1 + count * -(-length // PAGE)
        rows, scales = self.random(pages * PAGE, self.row_heads, self.width), None
        if stored:
            rows, scales = encode(rows, CACHES[stored])
        k, v = self._halves(rows.view(pages, PAGE, *rows.shape[1:]))
        if self.cfg.mla:
            v = k[..., : self.cfg.mla.kv_rank]
        if scales is None:
            return LayerCache(rows, k, v)
        paged = beside(scales, PAGE)
        return LayerCache(rows, k, v, paged, *self._halves(paged))

    def _halves(self, paged: Tensor) -> tuple[Tensor, Tensor]:
        """Of the heads: keys and values, which are one for MLA."""
        return paged[:, :, : self.key_heads], paged[:, :, self.row_heads - self.key_heads :]

    def norm(self) -> list[Case]:
        weight, inputs = self.random(self.cfg.hidden_size), self._steps(self.cfg.hidden_size)
        calls = [partial(self.ops.rms_norm, x, weight, self.cfg.eps) for x in inputs]
        return [Case(f"norm, {TOKENS} rows", "GB/s", 2 * inputs[0].nbytes, calls)]

    def gate(self) -> list[Case]:
        inputs = self._steps(2 * self.cfg.intermediate)
        calls = [partial(self.ops.silu_mul, x) for x in inputs]
        return [Case(f"gate, {TOKENS} rows", "GB/s", 1.5 * inputs[0].nbytes, calls)]

    def rope_store(self) -> list[Case]:
        """Queries and keys are rotated in place, keys and values written to the cache."""
        cfg, heads = self.cfg, self.cfg.heads + 2 * self.cfg.kv_heads
        inputs = [x.view(TOKENS, heads, cfg.head_dim) for x in self._steps(heads * cfg.head_dim)]
        angles = torch.rand(TOKENS, 1, cfg.rope.dim // 2, device=self.device, generator=self.generator)
        cache, slots = self._cache(1, TOKENS, None), torch.arange(PAGE, PAGE + TOKENS, device=self.device)
        calls = [partial(self.ops.rope_store, x, angles.cos(), angles.sin(), cfg.heads, cache, slots) for x in inputs]
        moved = heads + (cfg.heads + cfg.kv_heads) + 2 * cfg.kv_heads
        return [Case(f"rope and store, {TOKENS} rows", "GB/s", moved * inputs[0].nbytes / heads, calls)]

    def _steps(self, columns: int) -> list[Tensor]:
        count = max(2, COLD // (TOKENS * columns * self.dtype.itemsize))
        return [self.random(TOKENS, columns) for _ in range(count)]

    def sampling(self) -> list[Case]:
        """64 rows with temperature and top-p; the bytes of the logits, as the head leaves them, count once."""
        from minicpm_cli.kernels.sampling import draws_for

        rows = 64
        width = -(-self.cfg.vocab // BLOCK) * BLOCK
        logits = [self.random(rows, width)[:, : self.cfg.vocab] for _ in range(8)]
        draws = draws_for(rows, self.cfg.vocab, self.device, self.folder)
        calls = [partial(draws, x, _draw_state(rows, self.device)) for x in logits]
        return [Case(f"sampling top-p 0.8, {rows} rows", "GB/s", logits[0].nbytes, calls)]


def _draw_state(rows: int, device: torch.device) -> SimpleNamespace:
    def filled(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    return SimpleNamespace(
        seed=torch.arange(rows, device=device),
        index=torch.arange(rows, device=device),
        temperature=filled(0.8, torch.float32),
        top_p=filled(0.8, torch.float64),
        min_p=filled(0.0, torch.float32),
        top_k=filled(0, torch.int32),
    )


def paged_batch(count: int, new: int, length: int, device: torch.device) -> ForwardBatch:
    """`count` sequences of `length` tokens in consecutive pages behind the dummy; the last `new` tokens are new."""
    columns = -(-length // PAGE)
    table = 1 + torch.arange(count * columns, device=device).view(count, columns)
    places = torch.arange(length - new, length, device=device)
    slots = (table[:, places // PAGE] * PAGE + places % PAGE).flatten()
    starts = torch.arange(0, (count + 1) * new, new, device=device, dtype=torch.int32)
    return ForwardBatch(
        ids=torch.zeros(count * new, dtype=torch.int64, device=device),
        positions=places.repeat(count),
        slots=slots,
        q_start=starts,
        kv_len=torch.full((count,), length, dtype=torch.int32, device=device),
        page_table=table.int(),
        last=starts[1:].long() - 1,
        max_q=new,
        max_kv=length,
        page_size=PAGE,
        q_lens=(new,) * count,
        kv_lens=(length,) * count,
        runs=tuple(1 + columns * row for row in range(count)),
    )
