"""Rotary position embeddings with every scaling rule of the family, as one table of inverse frequencies.

Rules that depend on the sequence length (dynamic NTK, LongRoPE) take the context that the model is opened for, not the
length of each sequence: keys in the cache stay valid while a sequence grows, and prefixes can be shared.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minicpm_cli.kernels import reference
from minicpm_cli.kernels.ops import Angles
from minicpm_cli.model.config import RopeConfig


class Rotary:
    """cos and sin of a step's positions, computed in float32."""

    def __init__(self, rope: RopeConfig, context: int, device: torch.device, angles: Angles = reference.angles) -> None:
        frequencies, self.attention_factor = inverse_frequencies(rope, context)
        self.frequencies, self._angles = frequencies.to(device), angles

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:  # [T] -> 2 x [T, 1, dim/2] float32
        return self._angles(positions, self.frequencies, self.attention_factor)


def inverse_frequencies(rope: RopeConfig, context: int) -> tuple[Tensor, float]:
    """[dim/2] float32 inverse frequencies, and the factor of cos and sin."""
    factor = 1.0 if rope.attention_factor is None else rope.attention_factor
    if rope.kind == "linear":
        return _plain(rope, rope.theta) / rope.factor, factor
    if rope.kind == "dynamic":
        return _plain(rope, _ntk_base(rope, context)), factor
    if rope.kind == "longrope":
        return _longrope(rope, context)
    if rope.kind == "llama3":
        return _llama3(rope), factor
    if rope.kind == "yarn":
        return _yarn(rope)
    return _plain(rope, rope.theta), factor


def _plain(rope: RopeConfig, base: float) -> Tensor:
    """theta_i = base ** (-2i / dim) (RoFormer, section 3.2.2)."""
    return 1.0 / base ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)


def _ntk_base(rope: RopeConfig, context: int) -> float:
    """NTK-aware scaling of the base for contexts beyond the trained length; unscaled up to it."""
    length = max(context, rope.original_context)
    stretch = rope.factor * length / rope.original_context - (rope.factor - 1)
    return float(rope.theta * stretch ** (rope.dim / (rope.dim - 2)))


def _longrope(rope: RopeConfig, context: int) -> tuple[Tensor, float]:
    """One divisor a frequency, short or long, and a factor that grows with the stretch (LongRoPE, section 3.2)."""
    divisors = rope.long_factor if context > rope.original_context else rope.short_factor
    attention = rope.attention_factor
    if attention is None:
        stretch = rope.factor
        attention = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(rope.original_context))
    return _plain(rope, rope.theta) / torch.tensor(divisors), attention


def _llama3(rope: RopeConfig) -> Tensor:
    """Long wavelengths divided by `factor`, short ones kept, a linear blend between."""
    plain = _plain(rope, rope.theta)
    turns = rope.original_context * plain / (2 * math.pi)
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return plain * (blend + (1 - blend) / rope.factor)


def _yarn(rope: RopeConfig) -> tuple[Tensor, float]:
    """Interpolated where a frequency makes few turns, extrapolated where it makes many (YaRN, section 3.2)."""
    low, high = (_yarn_index(rope, turns) for turns in (rope.beta_fast, rope.beta_slow))
    low, high = max(math.floor(low), 0), min(math.ceil(high), rope.dim - 1)
    span = high - low if high > low else 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    plain = _plain(rope, rope.theta)
    attention = rope.attention_factor
    if attention is None:
        attention = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return plain * (1 - ramp) + plain / rope.factor * ramp, attention


def _yarn_index(rope: RopeConfig, turns: float) -> float:
    """The (fractional) index of the frequency that makes `turns` turns over the trained context."""
    return rope.dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
