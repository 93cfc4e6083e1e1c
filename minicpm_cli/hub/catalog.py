"""The names that stand for a model: the chat checkpoints that OpenBMB publishes, and the demo.

Counts are those of the checkpoints' own files or cards; what is not known is None and shown as "-".
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from minicpm_cli.hub import demo


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """`parameters` in all, `context` in tokens, `size` of the weights in bytes; `repo` is None for the demo."""

    alias: str
    repo: str | None
    parameters: int | None = None
    context: int | None = None
    licence: str | None = None
    size: int | None = None
    note: str = ""


_APACHE = "Apache-2.0"

CATALOG: tuple[CatalogEntry, ...] = (
    CatalogEntry("demo", None, 134_515_008, 8192, _APACHE, demo.GGUF_BYTES, "SmolLM2-135M-Instruct, to try the tool"),
    CatalogEntry("minicpm5-1b", "openbmb/MiniCPM5-1B", 1_080_632_832, 131_072, None, 2_161_290_912),
    CatalogEntry("minicpm5-2b", "openbmb/MiniCPM5-2B", 2_516_756_480, 131_072, None, 5_033_512_960),
    CatalogEntry("minicpm4.1-8b", "openbmb/MiniCPM4.1-8B", 8_180_000_000, 65_536, None, None, "thinks"),
    CatalogEntry("minicpm4-8b", "openbmb/MiniCPM4-8B", 8_180_000_000, 32_768),
    CatalogEntry("minicpm4-0.5b", "openbmb/MiniCPM4-0.5B", 434_000_000, 32_768, None, 868_000_000),
    CatalogEntry("minicpm3-4b", "openbmb/MiniCPM3-4B", 4_070_000_000, 32_768),
    CatalogEntry("minicpm3-4b-gptq", "openbmb/MiniCPM3-4B-GPTQ-Int4", 4_070_000_000, 32_768, None, None, "4 bit"),
    CatalogEntry("minicpm-2b", "openbmb/MiniCPM-2B-sft-bf16", 2_725_000_000, 4096),
    CatalogEntry("minicpm-2b-dpo", "openbmb/MiniCPM-2B-dpo-bf16", 2_725_000_000, 4096),
    CatalogEntry("minicpm-2b-128k", "openbmb/MiniCPM-2B-128k", 3_000_000_000, 65_536),
    CatalogEntry("minicpm-1b", "openbmb/MiniCPM-1B-sft-bf16", 1_360_000_000, 4096),
    CatalogEntry("minicpm-s-1b", "openbmb/MiniCPM-S-1B-sft", 1_360_000_000, 4096),
    CatalogEntry("minicpm-moe-8x2b", "openbmb/MiniCPM-MoE-8x2B", 13_900_000_000, 4096),
)


def find(alias: str) -> CatalogEntry | None:
    """The entry of that name; case does not matter."""
    return next((entry for entry in CATALOG if entry.alias == alias.lower()), None)


def nearest(alias: str) -> str | None:
    """The alias that was perhaps meant."""
    return next(iter(difflib.get_close_matches(alias.lower(), [entry.alias for entry in CATALOG], 1)), None)
