"""A loaded model that is asked with messages and answers with text events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from minicpm_cli.doctor import why_no_gpu
from minicpm_cli.engine.engine import Engine, EngineRequest, TokenEvent
from minicpm_cli.engine.memory import MemoryPlan
from minicpm_cli.errors import RequestError
from minicpm_cli.grammar.mask import GrammarMask
from minicpm_cli.hub.files import ModelFiles
from minicpm_cli.llm.checkpoint import KERNELS
from minicpm_cli.llm.device import choose_device, choose_dtype, dtype_name
from minicpm_cli.llm.info import LLMInfo, Occupancy, Speculated, Totals
from minicpm_cli.llm.opening import Opened, open_engine, plan_engine
from minicpm_cli.llm.prompter import Prompter
from minicpm_cli.llm.watch import Watch
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.kv_format import KVFormat
from minicpm_cli.settings import LoadOptions
from minicpm_cli.text.at_least import AtLeast
from minicpm_cli.text.detok import TextSink
from minicpm_cli.text.thinking import ThinkBudget, think_budget
from minicpm_cli.text.tool_calls import CallSink, Piece
from minicpm_cli.types import Channel, Event, FinishReason, Logprob, Request, SamplingParams, TokenMask

SEED_BITS = 53  # a JSON number holds it exactly


class LLM:
    """See `minicpm_cli.llm.info.LanguageModel`."""

    def __init__(self, prompter: Prompter, engine: Engine, info: LLMInfo, watch: Watch | None = None) -> None:
        self._prompter, self._engine, self.info, self._watch = prompter, engine, info, watch
        self.defaults: SamplingParams = prompter.defaults
        self.open_texts: Callable[[], Prompter] | None = None

    @classmethod
    def open(
        cls,
        options: LoadOptions,
        files: ModelFiles,
        on_progress: Callable[[int, int], None] | None = None,
        *,
        threads: int | None = None,
        cache: Path | None = None,
        prompter: Prompter | None = None,
    ) -> LLM:
        """Plans the memory, then loads. `on_progress` hears (layers done, layers). Raises ModelError or DeviceError.

        `cache` is the folder where compiled GPU kernels are kept, and the memory that the run took is written down;
        `prompter` is that of the same files, if there is one.
        """
        begun = time.monotonic()
        if threads is not None:
            torch.set_num_threads(threads)
        prompter = prompter or Prompter.open(options, files)
        checkpoint = prompter.checkpoint.with_options(options)
        device = choose_device(options.device)
        dtype = choose_dtype(options.dtype, device)
        plan = plan_engine(options, checkpoint, device, dtype)
        trained = checkpoint.cfg.context
        cfg = checkpoint.cfg.with_context(plan.context)
        prompter.checkpoint = checkpoint = replace(checkpoint, cfg=cfg, kernels=cache / KERNELS if cache else None)
        opened = open_engine(options, plan, checkpoint, device, dtype, on_progress, cache)
        info = _info(prompter, files, opened, plan, time.monotonic() - begun)
        notes = _notes(options, checkpoint.cfg, trained, device, looks_up=opened.engine.looks_up)
        if checkpoint.adapter and (told := checkpoint.adapter.note(files.name, options.model, files.path.name)):
            notes = (*notes, told)
        scheme = KVFormat.of(options.kv_dtype, dtype_name(dtype)).beside(info.scheme)
        llm = cls(prompter, opened.engine, replace(info, scheme=scheme, notes=notes), opened.watch)
        llm.open_texts = partial(Prompter.open, options, files)
        return llm

    @property
    def speculated(self) -> Speculated:
        stats = self._engine.stats
        return Speculated(stats.drafts, stats.proposed_tokens, stats.accepted_tokens)

    @property
    def totals(self) -> Totals:
        stats = self._engine.stats
        return Totals(stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens)

    @property
    def steps(self) -> int:
        """That the engine has taken."""
        return self._engine.stats.steps

    @property
    def gpu_peak_bytes(self) -> int | None:
        return None if self._watch is None else self._watch.gpu_peak_bytes

    @property
    def occupancy(self) -> Occupancy:
        stats, scheduler = self._engine.stats, self._engine.scheduler
        return Occupancy(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_total=scheduler.pool.usable,
            pages_held=scheduler.pool.held,
            pages_idle=scheduler.pool.idle,
            preemptions=stats.preemptions,
        )

    def cancel(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def plain_ids(self, text: str) -> list[int]:
        return self._prompter.plain_ids(text)

    def token_bytes(self, ident: int) -> bytes:
        return self._prompter.token_bytes(ident)

    def encoded(self, request: Request) -> Request:
        return self._prompter.encoded(request)

    def prompt(self, request: Request) -> list[int]:
        return self._prompter.prompt(request)

    def pieces(self, ids: Sequence[int]) -> list[tuple[int, str]]:
        return self._prompter.pieces(ids)

    def stream(self, requests: Iterable[Request | None]) -> Generator[Event]:
        running: dict[str, _Running | _Refused] = {}
        with closing(self._engine.generate(self._engine_requests(iter(requests), running))) as tokens:
            for token in tokens:
                yield from running[token.id].events(token)
                if token.finish is not None:
                    del running[token.id]

    def forget(self) -> None:
        self._engine.forget()

    def close(self) -> None:
        """Gives the memory back; the model cannot be asked any more."""
        if self._watch is not None:
            self._watch.close()
        self._engine = None  # type: ignore[assignment]
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _engine_requests(
        self, requests: Iterator[Request | None], running: dict[str, _Running | _Refused]
    ) -> Iterator[EngineRequest | None]:
        """Encodes each request when the engine has room for it. The engine refuses the empty prompt of a bad one at
        once, so that its error is told even where nothing else runs.
        """
        for request in requests:
            if request is None:
                yield None
                continue
            try:
                engine_request, state = self._admit(request)
            except Exception as error:  # noqa: BLE001 - whatever one request does to tokenizer or grammar is its own fault
                running[request.id] = _Refused(request.id, error)
                yield EngineRequest(request.id, (), request.params, seed=0)
                continue
            running[request.id] = state
            yield engine_request

    def _admit(self, request: Request) -> tuple[EngineRequest, _Running]:
        self._prompter.check_biases(request.params)
        prompt = request if request.ids is not None else self.encoded(request)
        calls = self._prompter.calling(request)
        params = calls.constrained(request.params) if calls else request.params
        seed = secrets.randbits(SEED_BITS) if params.seed is None else params.seed
        shown = calls.how.shown if calls else ()
        sink = TextSink(self._prompter.tokenizer, params.stop, prompt.channel, shown=shown)
        budget = think_budget(params, self._prompter.tokenizer, sink)
        rules = calls.forced.rules if calls else None
        grammar = self._prompter.grammars.mask(params, sink, budget, request.prefill, rules)
        mask = self._at_least(params, grammar, budget)
        out = CallSink(sink, calls.stream(request.id, seed)) if calls else sink
        eos_ids = frozenset[int]() if params.ignore_eos else self._prompter.eos_ids  # a mask ends its answer by itself
        engine_request = EngineRequest(
            request.id, tuple(prompt.ids or ()), params, seed, eos_ids=eos_ids, sink=out, mask=mask
        )
        asked = grammar is not None and params is request.params and rules is None  # calls are none
        follows = partial(self._prompter.grammars.complete, params) if asked else None
        return engine_request, _Running(request.id, out, seed, follows, [request.prefill], budget)

    def _at_least(
        self, params: SamplingParams, grammar: GrammarMask | None, budget: ThinkBudget | None
    ) -> TokenMask | None:
        """The mask of an answer that may have to be of some length. Raises RequestError(bad_parameter)."""
        if params.max_tokens is not None and params.min_tokens > params.max_tokens:
            raise RequestError(
                "bad_parameter",
                f"min_tokens is {params.min_tokens}, more than max_tokens, {params.max_tokens}. Change one of them.",
            )
        if not params.min_tokens or params.ignore_eos:
            return grammar or budget
        if grammar is not None:
            raise RequestError(
                "bad_parameter",
                f"min_tokens is {params.min_tokens}, but a schema, a regex or a tool's call says where it ends. "
                "Ask for its length there.",
            )
        return AtLeast(params.min_tokens, self._prompter.eos_ids, budget)


@dataclass(frozen=True, slots=True)
class _Refused:
    """A request that cannot be put to the engine."""

    id: str
    error: Exception

    def events(self, token: TokenEvent) -> Iterator[Event]:
        yield Event(self.id, finish="error", error=self.error)


@dataclass(slots=True)
class _Running:
    """One request on its way: token events in, text events out. Log-probabilities go with the text they belong to.

    `follows` judges the whole answer, where a schema or regex is asked for; `answer` gathers it.
    """

    id: str
    sink: TextSink | CallSink
    seed: int
    follows: Callable[[str], bool] | None = None
    answer: list[str] = field(default_factory=list)
    budget: ThinkBudget | None = None

    def events(self, token: TokenEvent) -> Iterator[Event]:
        if token.finish is None and token.logprob is None and self.follows is None:
            return (_event(self.id, channel, piece) for channel, piece in self.sink.take())
        return self._rare(token)

    def _rare(self, token: TokenEvent) -> Iterator[Event]:
        logprobs = (token.logprob,) if token.logprob is not None else ()
        for channel, piece in self.sink.take() if token.finish is None else self._rest(token.finish):
            yield _event(self.id, channel, piece, logprobs)
            logprobs = ()
            if channel == "answer" and isinstance(piece, str):
                self.answer.append(piece)
        if token.finish is not None or logprobs:
            yield Event(
                self.id,
                finish=self._finish(token.finish),
                usage=token.usage,
                timings=token.timings,
                seed=self.seed,
                logprobs=logprobs,
                error=token.error,
                incomplete=self._incomplete(token.finish),
                thought_out=self.budget is not None and self.budget.spent,
            )

    def _rest(self, finish: FinishReason) -> Sequence[tuple[Channel, Piece]]:
        return self.sink.close(finish) if isinstance(self.sink, CallSink) else self.sink.close()

    def _finish(self, finish: FinishReason | None) -> FinishReason | None:
        return self.sink.finish(finish) if finish is not None and isinstance(self.sink, CallSink) else finish

    def _incomplete(self, finish: FinishReason | None) -> bool:
        """Cut by the limit, by a stop string, or by a model that ended while it thought."""
        if self.follows is None or finish not in ("stop", "length"):
            return False
        return finish == "length" or not self.follows("".join(self.answer))


def _event(request_id: str, channel: Channel, piece: Piece, logprobs: tuple[Logprob, ...] = ()) -> Event:
    if isinstance(piece, str):
        return Event(request_id, piece, channel, logprobs=logprobs)
    return Event(request_id, logprobs=logprobs, tool_call=piece)


def _notes(
    options: LoadOptions, cfg: ModelConfig, trained: int, device: torch.device, *, looks_up: bool
) -> tuple[str, ...]:
    """What the user is told once."""
    notes = list(cfg.notes)
    if options.device == "auto" and device.type == "cpu":
        notes.append(f"no GPU can be used, so this runs on the CPU: {why_no_gpu()}")
    if options.lookup and not looks_up:
        notes.append(
            f"--lookup {options.lookup} does nothing here: on this GPU, or with these weights, several rows of a step "
            "do not come out as they would one by one"
        )
    if cfg.context > trained:
        notes.append(f"the model was made for {trained} tokens; with --ctx {cfg.context}, expect worse answers beyond")
    return tuple(notes)


def _info(prompter: Prompter, files: ModelFiles, opened: Opened, plan: MemoryPlan, seconds: float) -> LLMInfo:
    checkpoint, template, decoder = prompter.checkpoint, prompter.template, opened.decoder
    return LLMInfo(
        name=files.name,
        context=min(plan.context, plan.cache_tokens),
        scheme=checkpoint.scheme(dtype_name(decoder.dtype)),
        device=str(decoder.device),
        architecture=checkpoint.cfg.architecture,
        revision=files.revision,
        parameters=checkpoint.cfg.parameters,
        max_seqs=plan.max_seqs,
        weight_bytes=decoder.weight_bytes,
        cache_bytes=opened.kv.nbytes,
        cache_tokens=plan.cache_tokens,
        load_seconds=seconds,
        template=template.origin if template else "none",
        template_source=template.source if template else "",
        adapter=checkpoint.adapter.digest if checkpoint.adapter else "",
        details=checkpoint.load.details(checkpoint.cfg),
    )
