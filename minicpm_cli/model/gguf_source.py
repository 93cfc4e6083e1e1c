"""Tensors from a GGUF file under their Hugging Face names: floats mapped, 4- and 8-bit blocks kept packed, every other
ggml type unpacked a tensor at a time."""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minicpm_cli.errors import UnsupportedModel, WeightsError
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.gguf_header import GGUFTensor, read_header
from minicpm_cli.model.gguf_names import DERIVED, Part, huggingface_names
from minicpm_cli.model.ledger import Ledger
from quant.pack import GGUF_BLOCK_BYTES, Packed, from_gguf

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
INTEGERS = ("I8", "I16", "I32", "I64")
CHUNK = 1 << 22  # weights unpacked at once: bounds the temporaries of the unpacking


class GGUFSource:
    def __init__(self, path: Path, cfg: ModelConfig) -> None:
        self._path, self._cfg = path, cfg
        self._tensors = read_header(path).tensors
        self._parts = self._translate()
        self._ledger = Ledger(path, cfg, self._parts)
        self._map: mmap.mmap | None = _mapped(path)

    def _translate(self) -> dict[str, Part]:
        parts: dict[str, Part] = {}
        for tensor in self._tensors.values():
            if tensor.name in DERIVED:
                continue
            for name, part in huggingface_names(tensor.name, tensor.shape[0]):
                if name in parts:
                    raise WeightsError(
                        f"{self._path}: {part.tensor} and {parts[name].tensor} are the same tensor {name}"
                    )
                parts[name] = part
        return parts

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def names(self) -> set[str]:
        return set(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._parts:
            raise self._ledger.missing(name)
        return self._stored(name).shape

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor | Packed:
        self._ledger.use(name)
        stored = self._stored(name)
        self._ledger.check_shape(self._path, f"{name} ({stored.name})", stored.shape, shape)
        weights = self._read(stored)
        heads = self._permuted_heads(name)
        if not heads:
            return weights
        order = rotate_half_rows(shape[0], heads)
        return weights[order] if isinstance(weights, Tensor) else weights.rows(order)

    def ignore(self, name: str) -> None:
        self._ledger.ignore(name)

    def finish(self) -> None:
        self._map = None  # unmapped when the last tensor over it goes
        self._ledger.finish()

    def _stored(self, name: str) -> GGUFTensor:
        """The rows of the table for `name`: the tensor itself or one expert's slice of it."""
        part = self._parts[name]
        whole = self._tensors[part.tensor]
        if part.expert is None:
            return whole
        nbytes = whole.nbytes // whole.shape[0]
        return GGUFTensor(whole.name, whole.shape[1:], whole.type, whole.offset + part.expert * nbytes, nbytes)

    def _permuted_heads(self, name: str) -> int:
        """Heads whose rows llama.cpp's converter interleaved: q's and k's. It leaves MLA's q_b, kv_a and kv_b alone."""
        if name.endswith("self_attn.q_proj.weight"):
            return self._cfg.heads
        return self._cfg.kv_heads if name.endswith("self_attn.k_proj.weight") else 0

    def _read(self, stored: GGUFTensor) -> Tensor | Packed:
        if stored.type in FLOATS:
            return self._raw(stored, FLOATS[stored.type]).view(stored.shape)
        if stored.type in INTEGERS:
            raise WeightsError(
                f"{self._path}: tensor {stored.name} is {stored.type}, expected floats or quantized floats"
            )
        if stored.type in GGUF_BLOCK_BYTES and len(stored.shape) == 2:
            raw = self._raw(stored, torch.uint8).view(stored.shape[0], -1)
            return from_gguf(stored.type, raw, (stored.shape[0], stored.shape[1]))
        return self._unpacked(stored)

    def _raw(self, stored: GGUFTensor, dtype: torch.dtype) -> Tensor:
        assert self._map is not None, "take after finish"
        count = stored.nbytes // dtype.itemsize
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=stored.offset)

    def _unpacked(self, stored: GGUFTensor) -> Tensor:  # float32
        *lead, columns = stored.shape
        raw = self._raw(stored, torch.uint8).view(-1, stored.nbytes // math.prod(lead)).numpy()
        out = torch.empty(len(raw), columns, dtype=torch.float32)
        step = max(1, CHUNK // columns)
        for start in range(0, len(raw), step):
            out[start : start + step] = torch.from_numpy(self._dequantize(stored, raw[start : start + step]))
        return out.view(stored.shape)

    def _dequantize(self, stored: GGUFTensor, raw: Any) -> Any:
        import gguf  # 90 ms, and only files with such types need it

        try:
            return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[stored.type])
        except (KeyError, NotImplementedError):
            raise UnsupportedModel(
                f"{self._path}: tensor {stored.name} is of ggml type {stored.type}, which cannot be unpacked here; "
                "use a file of another quantization, such as Q4_K_M or Q8_0"
            ) from None


def rotate_half_rows(rows: int, heads: int) -> Tensor:  # [rows] int64
    """Row order that undoes llama.cpp's: it pairs element i of a head's first half with element i of its second."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def _mapped(path: Path) -> mmap.mmap:
    """Copy-on-write, so that torch may call the memory writable; nothing is ever written back."""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
