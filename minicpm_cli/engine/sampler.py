"""Draws one token for each row of logits.

In order: repetition, frequency and presence penalties, biases and the token mask (all before this module), temperature,
top-k, top-p of what top-k kept, min-p; transformers' order. Each filter is a threshold on the scores, so tokens of
equal score are kept or dropped together, and the draw inverts the cumulative distribution over the kept tokens in order
of id: a row's token depends on its own logits, parameters and uniform number alone. On a GPU kernels/sampling.py does
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minicpm_cli.engine.draws import uniforms
from minicpm_cli.engine.inputs import DRAW, DrawState, Layout, tempered
from minicpm_cli.types import SamplingParams
from quant.kernels import targets

CANDIDATES = 256  # most likely tokens that are sorted first; whole rows only where these do not hold the kept mass
LARGEST_K = 1024  # rows with a larger top-k are drawn again, whole


@dataclass(frozen=True, slots=True)
class Rows:
    """How each of S rows is drawn. Groups list the rows that need only argmax, no filter, or filters."""

    greedy: list[int]
    plain: list[int]
    filtered: list[int]
    uniform: Tensor  # [S] float64
    temperature: Tensor  # [S] float32
    top_p: Tensor  # [S] float64
    floor: Tensor  # [S] float32, log of min_p
    top_k: Tensor  # [S] int64, 0 is off
    largest_k: int
    state: DrawState | None = None  # the same for the kernels, where there are some

    @property
    def count(self) -> int:
        return len(self.greedy) + len(self.plain) + len(self.filtered)

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], seeds: Sequence[int], indices: Sequence[int], device: torch.device
    ) -> Rows:
        """`indices` count the tokens that each request has generated before."""
        groups: tuple[list[int], list[int], list[int]] = ([], [], [])
        for row, p in enumerate(params):
            groups[_group(p)].append(row)
        host = np.zeros((5, len(params)))
        if groups[1] or groups[2]:
            host[0] = uniforms(seeds, indices)
            host[1] = [tempered(p.temperature) for p in params]
            host[2] = [p.top_p for p in params]
            host[3] = [math.log(p.min_p) if p.min_p else -math.inf for p in params]
            host[4] = [p.top_k for p in params]
        u, temperature, top_p, floor, top_k = torch.from_numpy(host).to(device, non_blocking=True)
        greedy, plain, filtered = groups
        largest = max((params[row].top_k for row in filtered if params[row].top_k <= LARGEST_K), default=0)
        state = (
            _state(params, seeds, indices, device)
            if device.type == "cuda" and targets.triton_compiles(device)
            else None
        )
        return cls(greedy, plain, filtered, u, temperature.float(), top_p, floor.float(), top_k.long(), largest, state)

    def pick(self, rows: list[int]) -> Rows:
        """These rows alone, all of them with filters."""
        index = torch.tensor(rows, device=self.uniform.device)
        parts = (self.uniform, self.temperature, self.top_p, self.floor, self.top_k)
        u, temperature, top_p, floor, top_k = (part[index] for part in parts)
        return Rows([], [], list(range(len(rows))), u, temperature, top_p, floor, top_k, self.largest_k)


@dataclass(frozen=True, slots=True)
class Draw:
    """`peak` is the largest logit: not finite where the row cannot be drawn. Not `covered`: draw again, whole."""

    ids: Tensor  # [S] int64
    peak: Tensor  # [S] float32
    covered: Tensor  # [S] bool


Kernels = Callable[[Tensor, DrawState, None], tuple[Tensor, Tensor]]  # ids and peaks, drawn on a GPU


def sample(logits: Tensor, rows: Rows, kernels: Kernels | None = None) -> Draw:  # [S, V] float32
    """Draws without waiting for the device; `settle` waits and completes it. `kernels`: for rows with a state."""
    if rows.state is not None:
        return _on_gpu(logits, rows.state, kernels)
    parts = [
        (group, draw)
        for group, draw in ((rows.greedy, _argmax), (rows.plain, _plain), (rows.filtered, _among_candidates))
        if group
    ]
    if len(parts) == 1:
        return parts[0][1](logits, rows)
    whole = Draw(
        logits.new_empty(len(logits), dtype=torch.int64),
        logits.new_empty(len(logits)),
        logits.new_empty(len(logits), dtype=torch.bool),
    )
    for group, draw in parts:
        index = torch.tensor(group, device=logits.device)
        part = draw(logits[index], rows.pick(group))
        whole.ids[index], whole.peak[index], whole.covered[index] = part.ids, part.peak, part.covered
    return whole


def settle(draw: Draw, logits: Tensor, rows: Rows) -> tuple[list[int], list[float], Tensor]:
    """The ids and peaks on the host (one copy), and the ids on the device; redraws the rows that were not covered."""
    ids, peaks, covered = torch.stack([draw.ids.double(), draw.peak.double(), draw.covered.double()]).tolist()
    tokens, again = [int(i) for i in ids], [row for row, good in enumerate(covered) if not good]
    if not again:
        return tokens, peaks, draw.ids
    index = torch.tensor(again, device=logits.device)
    redrawn = _among_all(logits[index], rows.pick(again)).ids
    for row, token in zip(again, redrawn.tolist(), strict=True):
        tokens[row] = token
    return tokens, peaks, draw.ids.index_copy(0, index, redrawn)


def _group(params: SamplingParams) -> int:
    if params.temperature == 0 or params.top_k == 1 or params.top_p == 0:
        return 0
    return 2 if params.top_k or params.top_p < 1 or params.min_p else 1


def _state(
    params: Sequence[SamplingParams], seeds: Sequence[int], indices: Sequence[int], device: torch.device
) -> DrawState:
    layout = Layout({name: (kind, len(params)) for name, kind in DRAW.items()})
    buffer = torch.empty(layout.stop, dtype=torch.uint8)
    host = layout.host(buffer)
    host["seed"].view(np.uint64)[:] = seeds
    host["index"][:] = indices
    host["temperature"][:] = [tempered(p.temperature) for p in params]
    for name in ("top_p", "min_p", "top_k"):
        host[name][:] = [getattr(p, name) for p in params]
    return DrawState.of(layout.device(buffer.to(device)))


def _on_gpu(logits: Tensor, state: DrawState, kernels: Kernels | None) -> Draw:
    from minicpm_cli.kernels.sampling import draws_for  # triton: only where a GPU is

    ids, peak = (kernels or draws_for(len(logits), logits.shape[1], logits.device))(logits, state, None)
    return Draw(ids, peak, torch.ones_like(ids, dtype=torch.bool))


def _argmax(logits: Tensor, _: Rows) -> Draw:
    ids = logits.argmax(-1)  # the lowest id among equals
    peak = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return Draw(ids, peak, torch.ones_like(ids, dtype=torch.bool))


def _plain(logits: Tensor, rows: Rows) -> Draw:
    peak, scores = _scores(logits, rows)
    ids = _invert(scores.exp_(), rows.uniform)
    return Draw(ids, peak, torch.ones_like(ids, dtype=torch.bool))


def _among_candidates(logits: Tensor, rows: Rows) -> Draw:
    count = max(CANDIDATES, 2 * rows.largest_k)
    if logits.shape[-1] <= count:
        return _among_all(logits, rows)
    peak, scores = _scores(logits, rows)
    top, index = scores.topk(count)
    weights = scores.exp_()
    of_top = weights.gather(-1, index)
    threshold, exact = _threshold(top, of_top, weights, rows)
    covered = exact & (top[:, -1] < threshold) | ~peak.isfinite()
    kept = torch.where(top >= threshold.unsqueeze(-1), of_top, 0.0)
    by_id, order = index.sort(-1)
    place = _invert(kept.gather(-1, order), rows.uniform)
    return Draw(by_id.gather(-1, place.unsqueeze(-1)).squeeze(-1), peak, covered)


def _among_all(logits: Tensor, rows: Rows) -> Draw:
    peak, scores = _scores(logits, rows)
    weights = scores.exp()
    threshold, _ = _threshold(_falling(scores), _falling(weights), weights, rows)
    ids = _invert(torch.where(scores >= threshold.unsqueeze(-1), weights, 0.0), rows.uniform)
    return Draw(ids, peak, torch.ones_like(ids, dtype=torch.bool))


def _scores(logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Peaks [S], and scores [S, V] at the rows' temperatures, shifted so that the largest is 0."""
    peak = logits.amax(-1)
    return peak, (logits - peak.unsqueeze(-1)).div_(rows.temperature.unsqueeze(-1))


def _falling(values: Tensor) -> Tensor:  # [S, V], each row sorted
    """On the CPU numpy sorts 49,000 values in a tenth of torch's time, which carries the indices along."""
    if values.device.type != "cpu":
        return values.sort(-1, descending=True).values
    return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)


def _threshold(
    top: Tensor,  # [S, C] scores, falling
    of_top: Tensor,  # [S, C] their weights
    weights: Tensor,  # [S, V] weights of all tokens
    rows: Rows,
) -> tuple[Tensor, Tensor]:
    """The lowest score [S] that all filters keep, and whether it is exact although only C scores were looked at."""
    k = rows.top_k.clamp(max=top.shape[-1])
    of_k = torch.where(k > 0, top.gather(-1, (k - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1), -math.inf)
    mass = torch.where(top >= of_k.unsqueeze(-1), of_top, 0.0).double()
    reached = mass.cumsum(-1)
    whole = torch.where(k > 0, reached[:, -1], weights.sum(-1, dtype=torch.float64))
    # A token is kept while the more likely ones have not reached top_p.
    kept = (reached - mass < (rows.top_p * whole).unsqueeze(-1)).sum(-1)
    of_p = top.gather(-1, (kept - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)
    of_p = torch.where(rows.top_p < 1, of_p, -math.inf)
    threshold = torch.maximum(torch.maximum(of_k, of_p), rows.floor)
    return threshold, (k == 0) | (top[:, -1] < of_k)


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:  # [S, N], [S] -> [S] int64
    """The first place where the cumulative weight exceeds uniform * total; its own weight is then above 0."""
    reached = weights.cumsum(-1, dtype=torch.float64)
    total = reached[:, -1:]
    target = torch.minimum(uniform.unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(reached, target, right=True).squeeze(-1)
    return place.clamp_(max=weights.shape[-1] - 1)  # a row of NaN finds no place
