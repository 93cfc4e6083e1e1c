"""One step on the device: inputs, forward, sample. On a GPU a pipeline launches it, and its tokens are read later."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from minicpm_cli.engine import inputs
from minicpm_cli.engine.graphs import CudaCapture, DeviceDraw, Draw
from minicpm_cli.engine.masks import masked
from minicpm_cli.engine.penalties import Penalties, biased
from minicpm_cli.engine.pipeline import Pipeline
from minicpm_cli.engine.plan import Plan
from minicpm_cli.engine.sampler import Rows, sample, settle
from minicpm_cli.engine.sequence import Drawn, EngineConfig, Sequence
from minicpm_cli.errors import MinicpmError, RequestError
from minicpm_cli.kernels.batch import ForwardBatch
from minicpm_cli.types import Logprob
from quant.kernels import targets


class Vocabulary(Protocol):
    @property
    def vocab(self) -> int: ...


class Model(Protocol):
    """What the engine needs of a decoder: logits [S, V] of a batch, keys and values written to `kv`."""

    @property
    def cfg(self) -> Vocabulary: ...

    @property
    def device(self) -> torch.device: ...

    def forward(self, batch: ForwardBatch, kv: Any) -> Tensor: ...


class Flight(Protocol):
    """A step that was launched. `draws` are those of `plan.sampled`; they may be asked for after `wait`."""

    @property
    def plan(self) -> Plan: ...

    def complete(self) -> None:
        """Launches what had to wait for the tokens before: they are known now. Once, before `wait`."""

    def wait(self) -> None: ...

    def draws(self) -> Drawn: ...


@dataclass(frozen=True, slots=True)
class Landed:
    """A step whose tokens the host knows."""

    plan: Plan
    drawn: Drawn

    def complete(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def draws(self) -> Drawn:
        return self.drawn


class Forward:
    """The model over its cache. It stands alone, so that nothing that runs it keeps the engine alive."""

    def __init__(self, model: Model, kv: Any) -> None:
        self.step: Callable[[ForwardBatch, Any], Tensor] = model.forward
        self.kv = kv

    @torch.inference_mode()
    def __call__(self, batch: ForwardBatch) -> Tensor:
        return self.step(batch, self.kv)


class Runner:
    """`pipeline` runs a GPU's steps. Without it, or for requests that need the host, a step is done at its launch."""

    def __init__(self, model: Model, kv: Any, config: EngineConfig, draw: Draw | None = None) -> None:
        self.page_size, self.device = config.page_size, model.device
        self.forward = Forward(model, kv)
        on_gpu = model.device.type == "cuda"
        self.penalties = Penalties(model.cfg.vocab, model.device, config.max_seqs if on_gpu or config.lag else 0)
        self.pipeline: Pipeline | None = None
        if not on_gpu and not config.lag:
            return
        with self._on_device():
            capture = CudaCapture() if on_gpu and config.graphs and _capturable(model) else None
            on_device = DeviceDraw(_kernel_draws(config, model) if draw is None and on_gpu else draw, self.penalties)
            self.pipeline = Pipeline(config, model.device, self.forward, told, on_device, capture)

    @property
    def host_draws(self) -> bool:
        """Whether only the host can draw other tokens than the likeliest."""
        return self.pipeline is None or self.pipeline.draw.draw is None

    def launch(self, plan: Plan) -> Flight:
        with self._on_device():
            return self._launch(plan)

    def _launch(self, plan: Plan) -> Flight:
        if self.pipeline is not None and not plan.hosted:
            return self.pipeline.launch(plan)
        if self.pipeline is not None and plan.decodes:
            logits = self.pipeline.logits(plan)
        else:
            logits = self.forward(self.inputs(plan))
        return Landed(plan, self.sample(plan, logits))

    def complete(self, flight: Flight) -> None:
        with self._on_device():
            flight.complete()

    def captures(self, plan: Plan) -> bool:
        """Whether launching the plan captures its decode step first. What the host draws of is not counted."""
        return self.pipeline is not None and not plan.hosted and self.pipeline.captures(plan)

    def ready(self, running: list[Sequence]) -> bool:
        """Whether a decode step of these is launched without being captured first."""
        if self.pipeline is None or not running or max([seq.length - seq.planned for seq in running]) > 1:
            return True
        return self.pipeline.ready(running)

    def inputs(self, plan: Plan) -> ForwardBatch:
        return inputs.build(plan, self.page_size, pinned=self.device.type == "cuda").to(self.device)[0]

    @torch.inference_mode()
    def sample(self, plan: Plan, logits: Tensor) -> Drawn:  # [S, V]
        """A token, or the reason why there is none, for each sequence of `plan.sampled`. Waits for the device."""
        seqs = plan.sampled
        if not seqs:
            return Drawn([])
        rows = Rows.of(
            [seq.request.params for seq in seqs],
            [seq.request.seed for seq in seqs],
            [seq.drawn_before(start + size) for seq, start, size, sampled in plan.chunks if sampled],
            self.device,
        )
        logits = logits.float()
        scores = biased(self.penalties.apply(logits, seqs), seqs)
        scores, refused = masked(scores, seqs)
        kernels = None if self.pipeline is None else self.pipeline.draw.draw
        tokens, peaks, ids = settle(sample(scores, rows, kernels), scores, rows)
        self.penalties.note(seqs, ids)
        drawn = told(plan, tokens, peaks)
        drawn.errors.update(refused)
        return with_logprobs(drawn, logits, ids, seqs)

    def reset(self) -> None:
        """No request lives on, and no step is in flight."""
        self.penalties.clear()
        self.settle()

    def settle(self) -> None:
        """Waits for steps whose tokens nobody asked for."""
        if self.pipeline is not None:
            with self._on_device():
                self.pipeline.settle()

    def _on_device(self) -> AbstractContextManager[None]:
        """Makes the model's GPU the one that kernels are launched on, whichever thread asks."""
        if self.device.type != "cuda" or self.device.index == torch.cuda.current_device():
            return nullcontext()
        return torch.cuda.device(self.device)


def _kernel_draws(config: EngineConfig, model: Model) -> Draw | None:
    """None: only the host can draw, since Triton is not installed or does not know the GPU."""
    if not targets.triton_compiles(model.device):
        return None
    from minicpm_cli.kernels.sampling import draws_for  # triton: only where a GPU is

    return draws_for(config.rows, model.cfg.vocab, model.device, getattr(model, "kernels", None))


def alike_rows(model: Model) -> int | None:
    """Steps of up to so many rows compute the same for each, whatever is beside it; None: the model does not say."""
    rows: int | None = getattr(model, "alike_rows", None)
    return rows


def _capturable(model: Model) -> bool:
    """Whether nothing in the model's step asks the host; see `Decoder.capturable`."""
    return bool(getattr(model, "capturable", True))


def told(plan: Plan, tokens: list[int], peaks: list[float]) -> Drawn:
    """What the host is told of the tokens drawn; a peak, of float32, that is not finite tells that there is none."""
    if math.isfinite(sum(peaks)):  # only if each is
        return Drawn(tokens)
    errors = {row: _error(plan.sampled[row], peak) for row, peak in enumerate(peaks) if not math.isfinite(peak)}
    return Drawn(tokens, errors=errors)


def with_logprobs(drawn: Drawn, logits: Tensor, ids: Tensor, seqs: list[Sequence]) -> Drawn:
    """Adds what requests asked for: log-probabilities of the model itself, before penalties, mask and temperature."""
    wanted = [seq.request.params.logprobs for seq in seqs]
    rows = [row for row, n in enumerate(wanted) if n is not None and row not in drawn.errors]
    if not rows:
        return drawn
    index = torch.tensor(rows, device=logits.device)
    logprobs = logits[index].log_softmax(-1)
    chosen = logprobs.gather(-1, ids[index].unsqueeze(-1)).squeeze(-1).tolist()
    most = min(max(wanted[row] or 0 for row in rows), logits.shape[-1])
    values, tokens = (part.tolist() for part in logprobs.topk(most))
    for place, row in enumerate(rows):
        n = wanted[row] or 0
        top = tuple(zip(tokens[place][:n], values[place][:n], strict=True))
        drawn.logprobs[row] = Logprob(drawn.tokens[row], chosen[place], top)
    return drawn


def _error(seq: Sequence, peak: float) -> Exception:
    if seq.request.mask is not None and peak == -math.inf:
        return RequestError("schema_invalid", "the schema or regex allows no further token here")
    return MinicpmError(
        f"the model's scores are not finite (largest: {peak}) after {len(seq.tokens)} tokens, most likely an "
        "overflow of float16. Run again with --dtype bf16 or fp32; if it stays, the weights are damaged."
    )
