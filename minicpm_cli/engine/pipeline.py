"""Steps whose tokens stay on the device: launched without waiting, read when the host gets to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from itertools import cycle
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minicpm_cli.engine import inputs
from minicpm_cli.engine.decode_inputs import DecodeHost, DecodeLayout
from minicpm_cli.engine.graphs import Capture, DecodeSteps, DeviceDraw, Form, Work, padded
from minicpm_cli.engine.inputs import StepInputs, Tensors
from minicpm_cli.engine.lockstep import Continued
from minicpm_cli.engine.masks import apply_bitmask, fill_masks, words_of
from minicpm_cli.engine.penalties import Penalties
from minicpm_cli.engine.plan import Chunk, Kind, Plan, kind_of
from minicpm_cli.engine.prefills import PrefillSteps
from minicpm_cli.engine.sequence import Drawn, EngineConfig, Sequence
from minicpm_cli.kernels.batch import ForwardBatch

SLOTS = 2  # one step is in flight while the next is written
PROMPTS_APART = 2  # short prompts of a step that run one by one; more together


class Mark(Protocol):
    """A place in the device's queue, such as torch.cuda.Event."""

    def synchronize(self) -> None: ...


class Passed:
    """The mark of work that is done."""

    def synchronize(self) -> None:
        pass


PASSED = Passed()
Submit = Callable[[Work], Mark]
Told = Callable[[Plan, list[int], list[float]], Drawn]


def submit_now(work: Work) -> Mark:
    work()
    return PASSED


class CudaQueue:
    """The current stream. A mark is set anew when nobody can be waiting for it: a step has at most two of them."""

    def __init__(self) -> None:
        self._marks = cycle([torch.cuda.Event() for _ in range(2 * SLOTS)])  # type: ignore[no-untyped-call]

    def __call__(self, work: Work) -> Mark:
        work()
        mark = next(self._marks)
        mark.record()
        return mark


class Slot:
    """The host's memory of a step: inputs on their way there and what comes back. Free once `mark` is passed."""

    def __init__(self, layout: DecodeLayout, page_size: int, penalties: Penalties, *, pinned: bool) -> None:
        self.inputs = DecodeHost(layout, page_size, penalties, pinned=pinned)
        self.results = torch.zeros(layout.drawn.stop, dtype=torch.uint8, pin_memory=pinned)
        self._words = partial(torch.empty, layout.rows, words_of(penalties.vocab), dtype=torch.int32, pin_memory=pinned)
        self.mark: Mark = PASSED
        views = layout.drawn.host(self.results)
        self.ids: NDArray[np.int64] = views["drawn"]
        self.peaks: NDArray[np.float32] = views["peak"]

    @cached_property
    def words(self) -> Tensor:  # [rows, ceil(V / 32)] int32
        """The masks of a step's rows."""
        return self._words()


class DeviceFlight:
    """Must be read before the second launch after it, when its slot is used again."""

    def __init__(self, plan: Plan, slot: Slot, told: Told) -> None:
        self.plan, self._slot, self._mark, self._told = plan, slot, slot.mark, told

    def complete(self) -> None:
        pass

    def wait(self) -> None:
        self._mark.synchronize()
        if self._slot.mark is self._mark:
            self._slot.mark = PASSED

    def draws(self) -> Drawn:
        count = len(self.plan.sampled)
        return self._told(self.plan, self._slot.ids[:count].tolist(), self._slot.peaks[:count].tolist())


class MaskedFlight(DeviceFlight):
    """Draws when the tokens before are known, while its forward runs: the masks of its rows depend on them."""

    def __init__(self, plan: Plan, slot: Slot, told: Told, draw: Callable[[Tensor], Mark]) -> None:
        super().__init__(plan, slot, told)
        self._draw, self._refused = draw, dict[int, Exception]()

    def complete(self) -> None:
        words = self._slot.words[: len(self.plan.sampled)]
        self._refused = fill_masks(words.numpy(), self.plan.sampled)
        self._mark = self._slot.mark = self._draw(words)

    def draws(self) -> Drawn:
        drawn = super().draws()
        drawn.errors.update(self._refused)
        return drawn


class Pipeline:
    """Launches steps: decodes and short prompts on static buffers, others as they are. One stream orders them all."""

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device,
        run: Callable[[ForwardBatch], Tensor],
        told: Told,
        draw: DeviceDraw,
        capture: Capture | None,
    ) -> None:
        self.config, self.device, self._run, self._told, self.draw = config, device, run, told, draw
        columns = -(-config.limit // config.page_size)
        layout, self.pinned = DecodeLayout(config.rows, columns), device.type == "cuda"
        self.steps = DecodeSteps(layout, config.page_size, device, run, draw, capture)
        self.prefills = PrefillSteps(columns, config.page_size, device, run, draw, capture)
        self.submit: Submit = CudaQueue() if self.pinned else submit_now
        self._slots = [Slot(layout, config.page_size, draw.penalties, pinned=self.pinned) for _ in range(SLOTS)]
        self._turn = 0

    def ready(self, seqs: list[Sequence]) -> bool:
        """Whether a decode step of these is launched at once; else it is captured first."""
        return self.steps.ready(Form(padded(len(seqs), self.config.rows), _captured_kind(seqs)))

    def captures(self, plan: Plan) -> bool:
        """Whether launching the plan captures its decode step first."""
        if isinstance(plan, Continued) or not plan.decodes:
            return False
        return not self.steps.ready(Form.of(plan, "hosted" if plan.masked else plan.kind, self.config.rows))

    @torch.inference_mode()
    def launch(self, plan: Plan) -> DeviceFlight:
        if plan.masked:
            return self._launch_masked(plan)
        slot = self._slots[self._turn]
        slot.mark.synchronize()
        work = self._apart(plan, slot) or self._mixed(plan)
        begin = self.draw.penalties.begin()
        self._number_rows(plan)

        def step() -> None:
            begin()
            work()
            slot.results.copy_(self.steps.results, non_blocking=True)

        slot.mark = self.submit(step)
        self._turn = (self._turn + 1) % SLOTS
        return DeviceFlight(plan, slot, self._told)

    def _launch_masked(self, plan: Plan) -> MaskedFlight:
        """The forward now, the draw when its masks are there. The scores stay where they are until then."""
        slot = self._slots[self._turn]
        slot.mark.synchronize()
        kind, scores = plan.kind, list[tuple[Tensor, Tensors]]()
        forward = self._scores_of_decodes(plan, slot, kind) if plan.decodes else self._scores(plan, kind)
        begin = self.draw.penalties.begin()
        self._number_rows(plan)

        def compute() -> None:
            begin()
            scores.append(forward())

        @torch.inference_mode()
        def draw(words: Tensor) -> Mark:
            return self.submit(partial(self._take, scores, kind, words, slot))

        slot.mark = self.submit(compute)
        self._turn = (self._turn + 1) % SLOTS
        return MaskedFlight(plan, slot, self._told, draw)

    def _scores_of_decodes(self, plan: Plan, slot: Slot, kind: Kind) -> Callable[[], tuple[Tensor, Tensors]]:
        form = Form.of(plan, "hosted", self.config.rows)
        sent = slot.inputs.fill(plan, form.rows, kind)

        def forward() -> tuple[Tensor, Tensors]:
            self.steps.launch(sent, plan, form)
            return self.steps.logits[form], self.steps.rows(form.rows)

        return forward

    def _scores(self, plan: Plan, kind: Kind) -> Callable[[], tuple[Tensor, Tensors]]:
        host = self._built(plan, kind)

        def forward() -> tuple[Tensor, Tensors]:
            batch, rows = host.to(self.device, self.steps.drawn)
            return self._run(batch), rows

        return forward

    def _take(self, scores: list[tuple[Tensor, Tensors]], kind: Kind, words: Tensor, slot: Slot) -> None:
        """Rows beyond those of the masks are padding."""
        logits, rows = scores.pop()
        count = len(words)
        allowed = apply_bitmask(logits[:count], words.to(self.device, non_blocking=True))
        if len(logits) > count:
            allowed = torch.cat([allowed, logits[count:]])
        self.steps.take(allowed, kind, rows)
        slot.results.copy_(self.steps.results, non_blocking=True)

    def _number_rows(self, plan: Plan) -> None:
        if isinstance(plan, Continued):
            return  # they are those of the step before
        for row, seq in enumerate(plan.sampled):
            seq.row = row

    @torch.inference_mode()
    def logits(self, plan: Plan) -> Tensor:  # [S, V], until the next step
        """Of a decode step that the host draws from. Nothing may be in flight."""
        slot = self._slots[self._turn]
        slot.mark.synchronize()
        form = Form.of(plan, "hosted", self.config.rows)
        self.steps.launch(slot.inputs.fill(plan, form.rows, form.kind), plan, form)
        slot.mark = self.submit(lambda: None)
        return self.steps.logits[form][: plan.rows]

    def settle(self) -> None:
        """Waits for all that was launched, on whichever stream: the memory of steps left in flight is free again."""
        if self.pinned:
            torch.cuda.synchronize(self.device)  # a capture warms up on a stream of its own, a caller may bring another
        for slot in self._slots:
            slot.mark.synchronize()

    def _apart(self, plan: Plan, slot: Slot) -> Work | None:
        """The decodes and each of a few short prompts for itself, on static buffers; None if these are more.

        The weights are read more than once, which takes less time than the host needs to launch kernel by kernel.
        """
        if plan.decodes:
            return self._decode(plan, slot)
        prompts = plan.chunks[plan.decoding :]
        sizes = [self.prefills.size(chunk) for chunk in prompts[: PROMPTS_APART + 1]]
        if len(sizes) > PROMPTS_APART or 0 in sizes:
            return None
        works = [self._decode(Plan(plan.chunks[: plan.decoding]), slot)] if plan.decoding else []
        row = plan.decoding
        for chunk, size in zip(prompts, sizes, strict=True):
            works.append(self._prefill(chunk, size, row))
            row += chunk.sample

        def work() -> None:
            for part in works:
                part()

        return work

    def _decode(self, plan: Plan, slot: Slot) -> Work:
        form = Form.of(plan, plan.kind, self.config.rows)
        sent = slot.inputs.fill(plan, form.rows, form.kind)
        return lambda: self.steps.launch(sent, plan, form)

    def _prefill(self, chunk: Chunk, size: int, row: int) -> Work:
        host, kind = self.prefills.build(chunk, size, pinned=self.pinned), kind_of((chunk.seq,))

        def work() -> None:
            self.prefills.launch(host, size, kind)
            if chunk.sample:
                self.steps.drawn[row].copy_(self.prefills.drawn[0])
                self.steps.peaks[row].copy_(self.prefills.peak[0])

        return work

    def _mixed(self, plan: Plan) -> Work:
        kind = plan.kind
        host = self._built(plan, kind)

        def work() -> None:
            batch, rows = host.to(self.device, self.steps.drawn)
            logits = self._run(batch)
            if len(logits):
                self.steps.take(logits, kind, rows)

        return work

    def _built(self, plan: Plan, kind: Kind) -> StepInputs:
        penalties = None if kind == "greedy" else self.draw.penalties
        return inputs.build(plan, self.config.page_size, pinned=self.pinned, penalties=penalties)


def _captured_kind(seqs: list[Sequence]) -> Kind:
    """Of the part of a step that is captured: with masks, the forward alone."""
    return "hosted" if any(seq.masked for seq in seqs) else kind_of(seqs)
