"""A LoRA adapter (PEFT's format) held against the model that it is for, before any weight is read. No torch here.

Onto plain weights it is merged while they are loaded; beside packed ones it stays a term of low rank of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from minicpm_cli.errors import UnsupportedModel, WeightsError
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.ledger import shortened
from minicpm_cli.model.lora_config import CONFIG, WAY_OUT, LoraConfig
from minicpm_cli.model.lora_files import TensorHeader, identity, stored_tensors, weights_file
from minicpm_cli.model.shapes import EMBED, HEAD, Shape, is_absorbed, tensor_shapes

DIGEST = 8  # hex digits that tell one adapter from another, for people
MAGNITUDE = "magnitude"
_ROOT = "base_model.model."
_FACTOR = re.compile(
    r"^(?P<module>.+)\.lora_(?:(?:embedding_)?(?P<factor>[AB])|(?P<magnitude>magnitude)_vector)(?:\.weight)?$"
)
_OTHER = (
    "The adapter was trained on another model, or its files are of two adapters. Give the model that it was trained on "
    "with -m, or another --lora."
)


@dataclass(frozen=True, slots=True)
class Pair:
    """W + scale * B A, for W [N, K], A [rank, K] and B [N, rank] in the file's tensors `a` and `b`.

    `transposed`: of an embedding, whose table is [V, H], A is [rank, V] and B [H, rank]: W + scale * (B A)^T.
    `magnitude`: the tensor m [N] of DoRA (Liu et al. 2024, section 4.1), whose rows are those of the sum V at length m:
    m * V / |V|.
    """

    a: str
    b: str
    rank: int
    scale: float
    transposed: bool = False
    magnitude: str | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """`pairs` and `replaced` (tensors that were trained as a whole) by the names of the model's own tensors."""

    folder: Path
    file: Path
    config: LoraConfig
    pairs: Mapping[str, Pair]
    replaced: Mapping[str, str]
    shapes: Mapping[str, Shape]  # of the model's tensors that it changes
    digest: str
    tied: bool  # the model's head to its embedding

    @classmethod
    def read(cls, folder: Path, cfg: ModelConfig) -> Adapter:
        """Raises ConfigError, UnsupportedModel, or WeightsError for an adapter of another model."""
        config, file = LoraConfig.read(folder), weights_file(folder)
        check = _Check(config, file, stored_tensors(file), _shapes(cfg))
        pairs, replaced = check.contents()
        known = {name: shape for name, shape in _shapes(cfg).items() if name in pairs or name in replaced}
        adapter = cls(folder, file, config, pairs, replaced, known, identity(folder)["sha256"], cfg.tie)
        adapter._check_tying()
        return adapter

    @property
    def label(self) -> str:
        """For people: "lora r8 3f2a91bc"."""
        ranks = sorted({pair.rank for pair in self.pairs.values()})
        middle = f"r{'/'.join(map(str, ranks))} " if ranks else ""
        return f"{'dora' if self.config.dora else 'lora'} {middle}{self.digest[:DIGEST]}"

    def adapted(self, cfg: ModelConfig) -> ModelConfig:
        """The model with it: where it changes only one of a tied embedding and head, or each in its own way, they are
        two matrices from then on, as they are in PEFT."""
        return replace(cfg, tie=False) if self.unties else cfg

    def beside_bytes(self, packed: Callable[[str], bool], itemsize: int) -> int:
        """What its factors take in memory, where `packed(name)` tells the matrices that they cannot be merged into.

        Raises UnsupportedModel for DoRA there.
        """
        beside = [name for name in self.pairs if stays_beside(name) and packed(name)]
        for name in beside:
            self.check_beside(name)
        return itemsize * sum(self.pairs[name].rank * sum(self.shapes[name]) for name in beside)

    def check_beside(self, name: str) -> None:
        """Raises UnsupportedModel where the factors of a packed matrix cannot stay beside it."""
        if self.pairs[name].magnitude is not None:
            raise UnsupportedModel(
                f"{self.file}: DoRA rescales the rows of the weights that it is added to, and those of {name} are "
                "quantized. Give the unquantized model with -m; --quantize then quantizes what is merged."
            )

    @property
    def unpacked(self) -> frozenset[str]:
        """The tensors that are plain in memory with it, however they are stored."""
        return frozenset((*self.replaced, *(name for name in self.pairs if not stays_beside(name))))

    def note(self, *names: str) -> str | None:
        """What to say where none of the model's `names` is that of the model that it was trained on."""
        base = (self.config.base or "").rstrip("/").rsplit("/", 1)[-1].lower()
        ours = [name.rstrip("/").rsplit("/", 1)[-1].split("@")[0].lower() for name in names]
        if not base or any(name.startswith(base) or name == _plain(base) for name in ours):
            return None
        return f"the adapter says that it was trained on {self.config.base}; its shapes fit this model, too"

    @property
    def unties(self) -> bool:
        """Whether embedding and head were one matrix and are two with it."""
        changed = {*self.pairs, *self.replaced}
        return self.tied and not self.config.ties and not changed.isdisjoint({EMBED, HEAD})

    def _check_tying(self) -> None:
        """With `ensure_weight_tying` the new embedding is the new head."""
        if self.tied and self.config.ties and any(name in self.pairs for name in (EMBED, HEAD)):
            raise WeightsError(
                f"{self.file}: factors of a tied embedding or head (ensure_weight_tying) are not supported. "
                "Merge the adapter with PEFT (merge_and_unload) and give the merged folder with -m."
            )


def stays_beside(name: str) -> bool:
    """Whether the factors of a packed matrix `name` stay beside it; what MLA absorbs and the two ends are unpacked."""
    return not is_absorbed(name) and name not in (EMBED, HEAD)


@dataclass(frozen=True, slots=True)
class _Check:
    """What is in the file against what its config and the model say. `shapes` are the model's."""

    config: LoraConfig
    file: Path
    stored: Mapping[str, TensorHeader]
    shapes: Mapping[str, Shape]

    def contents(self) -> tuple[dict[str, Pair], dict[str, str]]:
        factors: dict[str, dict[str, str]] = {}
        replaced: dict[str, str] = {}
        strange = []
        for name in sorted(self.stored):
            inner = name.removeprefix(_ROOT)
            match = _FACTOR.match(inner)
            whole = inner.replace(".base_layer.", ".")
            if match and f"{match['module']}.weight" in self.shapes:
                factors.setdefault(f"{match['module']}.weight", {})[match["factor"] or match["magnitude"]] = name
            elif name.startswith(_ROOT) and whole in self.shapes:
                replaced[whole] = name
            else:
                strange.append(name)
        if strange:
            raise WeightsError(f"{self.file}: this model has no place for {_counted(strange)}. {_OTHER}")
        self._check_targets(set(factors), set(replaced))
        for target, source in replaced.items():
            self._check_shape(source, self.shapes[target])
        return {name: self._pair(name, parts) for name, parts in factors.items()}, replaced

    def _pair(self, name: str, parts: Mapping[str, str]) -> Pair:
        wanted = ("A", "B", MAGNITUDE) if self.config.dora else ("A", "B")
        missing = [factor for factor in wanted if factor not in parts]
        if missing:
            raise WeightsError(f"{self.file}: {name} has no factor {missing[0]}; fetch the adapter again")
        module, (rows, columns) = name.removesuffix(".weight"), self.shapes[name]
        rank, transposed = self.config.rank_of(module), "lora_embedding_A" in parts["A"]
        if transposed and self.config.dora:
            raise UnsupportedModel(f"{self.file}: DoRA of an embedding is not supported. {WAY_OUT}")
        if not self.config.dora and MAGNITUDE in parts:
            raise WeightsError(f"{self.file}: {name} has a magnitude, but {CONFIG} does not say use_dora. {_OTHER}")
        if transposed:
            rows, columns = columns, rows
        self._check_shape(parts["A"], (rank, columns))
        self._check_shape(parts["B"], (rows, rank))
        if magnitude := parts.get(MAGNITUDE):
            self._check_shape(magnitude, (rows,))
        return Pair(parts["A"], parts["B"], rank, self.config.scale_of(module), transposed, magnitude)

    def _check_shape(self, name: str, expected: Shape) -> None:
        found = self.stored[name].shape
        if found != expected:
            raise WeightsError(
                f"{self.file}: tensor {name} has shape {list(found)}, expected {list(expected)} by the model's config "
                f"and the adapter's. {_OTHER}"
            )

    def _check_targets(self, factors: set[str], replaced: set[str]) -> None:
        """Every tensor that the config promises for this model must be there, and no other."""
        wanted = {name for name, shape in self.shapes.items() if len(shape) == 2 and self._adapts(name)}
        if self.config.target_modules is None:
            wanted = factors
        whole = {name for name in self.shapes if self.config.saves(name.removesuffix(".weight"))}
        self._compare("target_modules", "are there", sorted(factors - wanted))
        self._compare("target_modules", "are missing", sorted(wanted - factors))
        self._compare("modules_to_save", "are missing", sorted(whole - replaced - self._tied_to(replaced)))
        if not factors and not replaced:
            raise WeightsError(f"{self.file} holds nothing that this model has. {_OTHER}")

    def _tied_to(self, replaced: set[str]) -> set[str]:
        return {EMBED, HEAD} if self.config.ties and replaced & {EMBED, HEAD} else set()

    def _adapts(self, name: str) -> bool:
        return self.config.adapts(name.removesuffix(".weight"), linear=name not in (EMBED, HEAD))

    def _compare(self, key: str, what: str, names: list[str]) -> None:
        if names:
            side = "against" if what == "are there" else "in spite of"
            raise WeightsError(
                f"{self.file}: tensors for {_counted(names)} {what} {side} the adapter's {key}. {_OTHER}"
            )


def _shapes(cfg: ModelConfig) -> dict[str, Shape]:
    """Every tensor of the model; the head also where it is the embedding's."""
    return tensor_shapes(cfg) | {HEAD: (cfg.vocab, cfg.hidden_size)}


def _counted(names: Iterable[str]) -> str:
    """The first of them, and how many there are."""
    return shortened(list(names))


def _plain(base: str) -> str:
    """The name without what quantized copies of a model add to it."""
    return re.sub(r"-(gptq|awq|gguf|int4|int8|bnb|4bit).*$", "", base)
