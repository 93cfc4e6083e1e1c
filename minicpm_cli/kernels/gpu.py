"""The operations as Triton kernels: the forms of minicpm_cli.kernels.reference on a CUDA device."""

from __future__ import annotations

import torch
from torch import Tensor

from minicpm_cli.kernels import begin, gate, norm, rope_store
from minicpm_cli.kernels.attention_decode import DecodeAttention
from minicpm_cli.kernels.attention_prefill import prefill
from minicpm_cli.kernels.batch import ForwardBatch
from minicpm_cli.kernels.cache import LayerCache
from minicpm_cli.kernels.launch import early
from minicpm_cli.kernels.ops import Attend, Ops


def kernels(device: torch.device) -> Ops:
    return Ops(
        embed=begin.embed,
        angles=begin.angles,
        rms_norm=norm.rms_norm,
        rope_=rope_store.rope_,
        rope_store=rope_store.rope_store,
        store=rope_store.store,
        silu_mul=gate.silu_mul,
        relu_mul=gate.relu_mul,
        attend=attention(device),
    )


def attention(device: torch.device) -> Attend:
    """One new token a sequence: split along the histories. Else all sequences in tiles of new tokens."""
    decode = DecodeAttention(device, pdl=early(torch.empty(0, device=device)))

    def attend(q: Tensor, cache: LayerCache, batch: ForwardBatch, scale: float) -> Tensor:
        if batch.max_q == 1:
            return decode(q, cache, batch.page_table, batch.kv_len, scale, batch.page_size)
        return prefill(q, cache, batch, scale)

    return attend
