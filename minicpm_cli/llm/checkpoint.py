"""What a checkpoint says of itself before a weight is read: config, sampling values, how its weights are stored."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minicpm_cli.errors import UsageError
from minicpm_cli.hub.files import read_json
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.gguf import GGUFHeader, config_from_gguf, read_header
from minicpm_cli.model.gguf_names import huggingface_names
from minicpm_cli.model.load_scheme import AS_STORED, LoadScheme, weight_bits, weight_bytes
from minicpm_cli.model.lora import Adapter
from minicpm_cli.model.quant_config import QuantConfig, read_config
from minicpm_cli.model.quant_marks import check_marks
from minicpm_cli.model.safetensors_header import FLOATS, Entry, all_entries
from minicpm_cli.model.shapes import EMBED, HEAD, is_absorbed, is_linear
from minicpm_cli.model.shards import safetensors_files
from minicpm_cli.settings import LoadOptions
from quant.scheme import Scheme

if TYPE_CHECKING:
    import torch

    from minicpm_cli.model.decoder import Decoder

KERNELS = "kernels"  # the folder of compiled GPU kernels in the cache
_PACKED = frozenset({"Q4_0", "Q4_1", "Q8_0"})  # stay packed in memory; other kinds are unpacked when they are loaded


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`packing` names how the files hold the weights, None where they hold plain ones; `load` quantizes on the way.

    `kernels` is the folder where compiled GPU kernels are kept. `adapter` is loaded with it.
    """

    path: Path
    cfg: ModelConfig
    packing: str | None = None
    load: LoadScheme = AS_STORED
    gptq_format: str | None = None
    kernels: Path | None = None
    adapter: Adapter | None = None
    _quant: QuantConfig | None = None
    _header: GGUFHeader | None = None

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Raises ConfigError, WeightsError or UnsupportedModel."""
        if path.is_dir():
            cfg = ModelConfig.from_hf(read_json(path / "config.json"), _generation(path))
            quant = QuantConfig.read(path)
            return cls(path, cfg, quant.name if quant else None, _quant=quant)
        header = read_header(path)
        return cls(path, ModelConfig.from_hf(config_from_gguf(header)), _packing(header), _header=header)

    def with_options(self, options: LoadOptions) -> Checkpoint:
        """As `options` load it. Raises UsageError for what they cannot do here, UnsupportedModel as `read_config`."""
        if options.quantize and self.packing:
            raise UsageError(
                f"{self.path} is quantized already ({self.packing}): leave --quantize {options.quantize} out, "
                "or give the unquantized model"
            )
        if self.path.is_dir() or options.gptq_format:
            read_config(self.path, options.gptq_format)
        load = LoadScheme.of(options.quantize, options.head_bits)
        load.check(self.cfg)
        head = None if self._head_is_packed else load.head
        loaded = replace(self, load=replace(load, head=head), gptq_format=options.gptq_format)
        return loaded.with_adapter(Path(options.lora)) if options.lora else loaded

    def with_adapter(self, folder: Path) -> Checkpoint:
        """Raises ConfigError, UnsupportedModel or WeightsError for one that cannot be loaded onto this model."""
        if self.adapter is not None and self.adapter.folder == folder:
            return self
        adapter = Adapter.read(folder, self.cfg)
        return replace(self, cfg=adapter.adapted(self.cfg), adapter=adapter)

    def decoder(
        self, device: torch.device, dtype: torch.dtype, on_progress: Callable[[int, int], None] | None = None
    ) -> Decoder:
        """Loads the weights; `on_progress` hears (layers done, layers)."""
        from minicpm_cli.model.loader import load_model

        return load_model(
            self.path,
            self.cfg,
            device,
            dtype,
            on_progress,
            scheme=self.load,
            gptq_format=self.gptq_format,
            kernels=self.kernels,
            adapter=self.adapter,
        )

    def scheme(self, plain: str) -> str:
        """How the weights lie in memory, for people; `plain` names the dtype of those that nothing packs."""
        name = self.load.name(self.cfg, self.packing or plain)
        return f"{name}, {self.adapter.label}" if self.adapter else name

    def weight_bytes(self, itemsize: int, *, cpu: bool = False) -> int:
        """What the weights will take in memory by the files' headers; plain ones have `itemsize` bytes an element.

        Raises WeightsError for files that are not whole.
        """
        if self._header is None:
            plain = self._plain() if self._quant else frozenset()
            held = weight_bytes(self.cfg, itemsize, lambda name, k: self._matrix(name, k, plain), cpu=cpu)
            packed = lambda name: self._is_packed(name, plain)  # noqa: E731
            return held + (self.adapter.beside_bytes(packed, 4 if cpu else itemsize) if self.adapter else 0)
        head, k = self.load.matrix(HEAD, self.cfg.hidden_size), self.cfg.hidden_size
        own = math.ceil(self.cfg.vocab * k * weight_bits(head, k, itemsize, cpu=cpu) / 8) if head else 0
        kept = 0 if cpu and itemsize != 2 else 2 if cpu else 1  # copies of what stays packed; see weight_bits
        found, beside = self._gguf_bytes(self._header, itemsize, kept, own_head=head is not None)
        extra = self.adapter.beside_bytes(beside.__contains__, 4 if cpu else itemsize) if self.adapter else 0
        return own + found + extra

    def _gguf_bytes(
        self, header: GGUFHeader, itemsize: int, kept: int, *, own_head: bool
    ) -> tuple[int, Container[str]]:
        """Of a file's tensors, of which packed ones stay so `kept` times; and those that nothing is merged into."""
        found = 0
        beside: set[str] = set()
        unpacked = self.adapter.unpacked if self.adapter else frozenset()
        for tensor in header.tensors.values():
            names = {name for name, _ in huggingface_names(tensor.name, tensor.shape[0])}
            packed = tensor.type in _PACKED
            size = tensor.nbytes * kept if kept and packed else math.prod(tensor.shape) * itemsize
            plain = math.prod(tensor.shape) * itemsize if names & unpacked else size
            found += plain
            beside |= names - unpacked if packed else set()
            if EMBED in names and self._untied(header) and not own_head:
                found += math.prod(tensor.shape) * itemsize if HEAD in unpacked else size
        return found, beside

    def _untied(self, header: GGUFHeader) -> bool:
        """Whether an adapter makes a head of what was only the embedding."""
        return self.adapter is not None and self.adapter.unties and "output.weight" not in header.tensors

    def _plain(self) -> frozenset[str]:
        """Matrices of a quantized folder that are plain in memory. Raises WeightsError if none are packed in fact."""
        entries = self._entries()
        if entries:
            check_marks(self._quant, entries, self.path)
        stored = frozenset(n for n, e in entries.items() if e.dtype in FLOATS)
        return stored | (self.adapter.unpacked if self.adapter else frozenset())

    def stored(self) -> dict[str, int]:
        """Bytes in the files by type of element, as their headers say; empty for PyTorch's own format."""
        found: Counter[str] = Counter()
        for tensor in self._header.tensors.values() if self._header else ():
            found[tensor.type] += tensor.nbytes
        for entry in self._entries().values():
            found[entry.dtype] += entry.end - entry.begin
        return dict(found.most_common())

    def _entries(self) -> dict[str, Entry]:
        shards = safetensors_files(self.path) if self.path.is_dir() else None
        return all_entries(shards) if shards else {}

    def _matrix(self, name: str, k: int, plain: Container[str]) -> Scheme | None:
        """How the matrix `name` is packed in memory; a quantizer may have left some `plain`."""
        if self._quant and self._is_packed(name, plain):
            return self._quant.of(name.removesuffix(".weight")).scheme
        return self.load.matrix(name, k)

    def _is_packed(self, name: str, plain: Container[str]) -> bool:
        """Of a quantized folder."""
        if self._quant is None or name in plain:
            return False
        return self._quant.head if name == HEAD else is_linear(name) and not is_absorbed(name)

    @property
    def _head_is_packed(self) -> bool:
        if self._header is None:
            return self._quant is not None and self._quant.head
        tensors = self._header.tensors
        holder = tensors.get("output.weight") or tensors.get("token_embd.weight")
        return holder is not None and holder.type in _PACKED


def _generation(path: Path) -> dict[str, Any] | None:
    file = path / "generation_config.json"
    return read_json(file) if file.is_file() else None


def _packing(header: GGUFHeader) -> str | None:
    """The kind that holds most bytes, if the file is quantized at all."""
    stored: Counter[str] = Counter()
    for tensor in header.tensors.values():
        stored[tensor.type] += tensor.nbytes
    kind = stored.most_common(1)[0][0] if stored else "F32"
    return None if kind in ("F32", "F16", "BF16") else kind
