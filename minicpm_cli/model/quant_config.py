"""What a checkpoint says of how its weights are packed: `quantization_config`, or a quantizer's own file beside it.

Only what runs here gets through; anything else is refused by name before a weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from minicpm_cli.errors import ConfigError, UnsupportedModel, UsageError
from minicpm_cli.hub.files import read_json
from quant.errors import SchemeError
from quant.scheme import ROW, Scheme

Method = Literal["gptq", "awq", "bitsandbytes", "compressed-tensors", "fp8"]
Version = Literal["gptq", "gptq_v2"]
SUPPORTED = (
    "gptq, awq (gemm), bitsandbytes (nf4, fp4, int8), compressed-tensors (pack-quantized, float-quantized) and fp8"
)
# Files that old quantizers write beside a config.json that says nothing, and the method that each means.
BESIDE: Mapping[str, Method] = MappingProxyType({"quantize_config.json": "gptq", "quant_config.json": "awq"})


HEAD_MODULE, HEAD_PATTERNS = "lm_head", ("lm_head", "^lm_head$")

# What --gptq-format calls them.
VERSIONS: Mapping[str, Version] = MappingProxyType({"v1": "gptq", "v2": "gptq_v2"})


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """How the linear layers of a checkpoint are packed; those that the files hold plain are simply plain.

    `version`: how GPTQ's files store zero points, None where nothing says it. `head`: whether the head is packed too.
    `fp4`: bitsandbytes' other table of 16 values in the place of NF4's. `head_bits`: of the head, where they differ.
    """

    origin: Path
    method: Method
    scheme: Scheme
    version: Version | None = None
    head: bool = False
    fp4: bool = False
    head_bits: int | None = None

    @classmethod
    def read(cls, folder: Path) -> QuantConfig | None:
        """None for a plain checkpoint. Raises UnsupportedModel or ConfigError."""
        for origin, raw in _sections(folder):
            entry = _Entry(origin, raw)
            method = entry.text("quant_method", BESIDE.get(origin.name, "")).lower()
            if method not in _READERS:
                what = f"quantization method {method!r}" if method else "a quantization method without a name"
                raise entry.unsupported(what, f"read are {SUPPORTED}")
            return _READERS[method](entry)
        return None

    def of(self, module: str) -> QuantConfig:
        """The same for one module, the head being the one that may differ."""
        if self.head_bits is None or module != HEAD_MODULE:
            return self
        return replace(self, scheme=replace(self.scheme, bits=self.head_bits), head_bits=None)

    @property
    def name(self) -> str:
        """For people: "gptq w4 g128 sym"."""
        scheme = "fp4" if self.fp4 else self.scheme.name
        return scheme if self.method == scheme else f"{self.method} {scheme}"


def read_config(folder: Path, gptq_format: str | None = None) -> QuantConfig | None:
    """What the checkpoint says, `gptq_format` applied. Raises UnsupportedModel, ConfigError or UsageError."""
    config = QuantConfig.read(folder)
    if gptq_format:
        if config is None or config.method != "gptq":
            kind = config.method if config else "not quantized"
            raise UsageError(
                f"--gptq-format {gptq_format} is for GPTQ checkpoints, and {folder} is {kind}; leave it out"
            )
        return replace(config, version=VERSIONS[gptq_format])
    if config and config.method == "gptq" and config.version is None and not config.scheme.symmetric:
        raise UnsupportedModel(
            f"{config.origin}: asymmetric GPTQ without checkpoint_format: its zero points can be read in two ways, one "
            "of which gives nonsense. Give --gptq-format v1 (AutoGPTQ and most others) or v2 and look at the answers."
        )
    return config


@dataclass(frozen=True, slots=True)
class _Entry:
    """Typed look-ups in the JSON object; messages name the file."""

    origin: Path
    raw: Mapping[str, Any]

    def whole(self, *keys: str, default: int | None = None) -> int:
        key = next((k for k in keys if k in self.raw), keys[0])
        value = self.raw.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(key, "a whole number")
        return value

    def yes(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return default if value is None else value

    def text(self, key: str, default: str) -> str:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value or default

    def section(self, value: Any, what: str) -> _Entry:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.origin}: {what} of the quantization is {value!r}; it must be an object")
        return _Entry(self.origin, value)

    def scheme(self, bits: int, group: int, **more: bool) -> Scheme:
        try:
            return Scheme("int", bits, group if group > 0 else ROW, **more)
        except SchemeError as error:
            raise UnsupportedModel(f"{self.origin}: the quantization cannot be read here. {error}") from None

    def wrong(self, key: str, want: str) -> ConfigError:
        what = f"is {self.raw[key]!r}" if key in self.raw else "is missing"
        return ConfigError(f"{self.origin}: {key} of the quantization {what}; it must be {want}")

    def unsupported(self, what: str, way_out: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.origin}: {what} is not supported; {way_out}")


def _sections(folder: Path) -> list[tuple[Path, Mapping[str, Any]]]:
    """The first place that speaks of quantization, as a list of one."""
    for name in ("config.json", *BESIDE):
        file = folder / name
        raw = read_json(file, required=False)
        section = (raw.get("quantization_config") or raw.get("compression_config")) if name == "config.json" else raw
        if section:
            return [(file, _Entry(file, raw).section(section, "quantization_config").raw)]
    return []


def _gptq(entry: _Entry) -> QuantConfig:
    way_out = "use a checkpoint in the format gptq or gptq_v2, or quantize the original with minicpm quantize"
    stored = entry.text("checkpoint_format", entry.text("format", "")).lower()
    if entry.raw.get("is_marlin_format") or "marlin" in stored:
        raise entry.unsupported("marlin, a layout for one GPU kernel,", way_out)
    if stored not in ("", "gptq", "gptq_v2"):
        raise entry.unsupported(f"checkpoint_format {stored!r}", way_out)
    head_bits = _dynamic_head(entry, way_out)
    if entry.text("pack_dtype", "int32") != "int32":
        raise entry.unsupported(f"pack_dtype {entry.raw['pack_dtype']!r}", way_out)
    scheme = entry.scheme(
        entry.whole("bits"),
        entry.whole("group_size", default=ROW),
        symmetric=entry.yes("sym", True),
        act_order=entry.yes("desc_act", False),
    )
    version: Version | None = "gptq_v2" if stored == "gptq_v2" else "gptq" if stored == "gptq" else None
    head = entry.yes("lm_head", False)
    return QuantConfig(entry.origin, "gptq", scheme, version, head=head, head_bits=head_bits if head else None)


def _dynamic_head(entry: _Entry, way_out: str) -> int | None:
    """The bits that `dynamic` gives the head. Layers that it leaves plain ("-:") are plain in the files."""
    bits = None
    for pattern, settings in entry.section(entry.raw.get("dynamic") or {}, "dynamic").raw.items():
        if pattern.startswith("-:"):
            continue
        own = entry.section(settings, f"dynamic {pattern!r}")
        if pattern.removeprefix("+:") not in HEAD_PATTERNS or set(own.raw) != {"bits"}:
            raise entry.unsupported("dynamic (other settings for some layers)", way_out)
        bits = own.whole("bits")
    return bits


def _awq(entry: _Entry) -> QuantConfig:
    way_out = "use a checkpoint in AutoAWQ's gemm format with zero points, or a GPTQ one"
    version = entry.text("version", "gemm").lower()
    if version != "gemm":
        raise entry.unsupported(f"AWQ version {version!r}", way_out)
    if not entry.yes("zero_point", True):
        raise entry.unsupported("AWQ without zero points", way_out)
    bits = entry.whole("bits", "w_bit")
    if bits != 4:
        raise entry.unsupported(f"AWQ with {bits} bits", way_out)
    return QuantConfig(
        entry.origin, "awq", entry.scheme(bits, entry.whole("group_size", "q_group_size"), symmetric=False)
    )


def _bitsandbytes(entry: _Entry) -> QuantConfig:
    if entry.yes("load_in_8bit", False):
        return QuantConfig(entry.origin, "bitsandbytes", Scheme("int8"))
    if not entry.yes("load_in_4bit", False):
        raise ConfigError(f"{entry.origin}: bitsandbytes, but neither load_in_4bit nor load_in_8bit is true")
    kind = entry.text("bnb_4bit_quant_type", "fp4").lower()
    if kind not in ("nf4", "fp4"):
        raise entry.unsupported(f"bnb_4bit_quant_type {kind!r}", "use nf4, or the original with --quantize nf4")
    return QuantConfig(entry.origin, "bitsandbytes", Scheme("nf4"), fp4=kind == "fp4")


def _compressed(entry: _Entry) -> QuantConfig:
    groups = entry.section(entry.raw.get("config_groups"), "config_groups").raw
    if len(groups) != 1:
        raise entry.unsupported(f"compressed-tensors with {len(groups)} config_groups", "use one with a single group")
    (group,) = (entry.section(g, "config_groups") for g in groups.values())
    weights = entry.section(group.raw.get("weights"), "weights")
    stored = group.text("format", entry.text("format", "")).lower()
    _refuse_compressed_extras(entry)
    if stored == "pack-quantized" and weights.text("type", "int") == "int":
        return QuantConfig(entry.origin, "compressed-tensors", _compressed_int(weights, group))
    if stored == "float-quantized" and weights.text("type", "float") == "float" and weights.whole("num_bits") == 8:
        return QuantConfig(entry.origin, "compressed-tensors", _compressed_fp8(weights, group))
    raise entry.unsupported(
        f"compressed-tensors format {stored or 'without a name'!r}", "read are pack-quantized and float-quantized (fp8)"
    )


def _refuse_compressed_extras(entry: _Entry) -> None:
    if entry.raw.get("kv_cache_scheme"):
        raise entry.unsupported("a quantized KV cache inside the checkpoint", "use one without kv_cache_scheme")
    sparsity = entry.raw.get("sparsity_config") or {}
    kind = entry.section(sparsity, "sparsity_config").text("format", "dense")
    if kind != "dense":
        raise entry.unsupported(f"sparsity {kind!r}", "use one without sparsity_config")
    status = entry.text("quantization_status", "compressed")
    if status != "compressed":
        raise entry.unsupported(f"quantization_status {status!r}", "use one that was saved compressed")


def _compressed_int(weights: _Entry, group: _Entry) -> Scheme:
    if group.raw.get("input_activations"):
        raise group.unsupported("int weights with quantized activations", "use weight-only ones (W4A16 or W8A16)")
    strategy = weights.text("strategy", "channel")
    if strategy not in ("group", "channel"):
        raise weights.unsupported(f"strategy {strategy!r} of compressed weights", "use group or channel")
    size = weights.whole("group_size") if strategy == "group" else ROW
    ordered = weights.raw.get("actorder") in ("group", "dynamic", True)
    symmetric = weights.yes("symmetric", True)
    return weights.scheme(weights.whole("num_bits"), size, symmetric=symmetric, act_order=ordered)


def _compressed_fp8(weights: _Entry, group: _Entry) -> Scheme:
    strategy = weights.text("strategy", "tensor")
    if strategy not in ("channel", "tensor"):
        raise weights.unsupported(f"strategy {strategy!r} of fp8 weights", "use channel or tensor")
    inputs = group.raw.get("input_activations")
    if inputs and not group.section(inputs, "input_activations").yes("dynamic", False):
        raise group.unsupported("fp8 with fixed scales of activations", "use one whose input_activations are dynamic")
    return Scheme("fp8")


def _fp8(entry: _Entry) -> QuantConfig:
    way_out = "use compressed-tensors fp8, or the original with --quantize fp8"
    if entry.raw.get("weight_block_size"):
        raise entry.unsupported("fp8 in blocks (weight_block_size)", way_out)
    if entry.text("activation_scheme", "dynamic") != "dynamic":
        raise entry.unsupported(f"fp8 with activation_scheme {entry.raw['activation_scheme']!r}", way_out)
    return QuantConfig(entry.origin, "fp8", Scheme("fp8"))


_READERS: Mapping[str, Callable[[_Entry], QuantConfig]] = MappingProxyType(
    {
        "gptq": _gptq,
        "awq": _awq,
        "bitsandbytes": _bitsandbytes,
        "compressed-tensors": _compressed,
        "fp8": _fp8,
    }
)
