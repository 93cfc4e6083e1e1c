"""Requests to token ids: config, tokenizer and chat template, without any weights."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from minicpm_cli.errors import RequestError, TemplateError
from minicpm_cli.grammar.grammars import Grammars
from minicpm_cli.hub.files import ModelFiles
from minicpm_cli.llm.calling import Calling, calling
from minicpm_cli.llm.checkpoint import Checkpoint
from minicpm_cli.settings import LoadOptions
from minicpm_cli.settings_table import DEFAULT_MODEL
from minicpm_cli.text.template import ChatTemplate, Prompt, build_prompt, load_template, raw_prompt, show_prompt
from minicpm_cli.text.tokenizer import Tokenizer, load_tokenizer
from minicpm_cli.types import Request, SamplingParams

# The tokenizer takes 0.4 s and 100 MB for a million characters: what is hopelessly too long is not given to it.
_CERTAINLY = 2  # as many characters as this times what the context could hold at the most


class Prompter:
    """The text side of a model. A checkpoint without a template can still be asked with raw prompts.

    With `lends_tools` one whose template takes no tools is shown them in the built-in ChatML: the demo model, so that
    programs can be tried with it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        template: ChatTemplate | TemplateError,
        *,
        lends_tools: bool = False,
    ) -> None:
        self.checkpoint, self.tokenizer, self._template = checkpoint, tokenizer, template
        self._lends_tools = lends_tools

    @classmethod
    def open(cls, options: LoadOptions, files: ModelFiles) -> Prompter:
        """Raises ConfigError, TokenizerError, or TemplateError for a template that the user named."""
        checkpoint = Checkpoint.read(files.path)
        tokenizer = load_tokenizer(files.path)
        template = _template(files.path, options.chat_template, tokenizer)
        lends_tools = files.name == DEFAULT_MODEL and options.chat_template == "auto"
        return cls(checkpoint, tokenizer, template, lends_tools=lends_tools)

    @property
    def template(self) -> ChatTemplate | None:
        return self._template if isinstance(self._template, ChatTemplate) else None

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.eos_ids)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends an answer: those of the config files and the tokenizer's own end tokens."""
        return frozenset(self.checkpoint.cfg.eos_ids) | frozenset(self.tokenizer.eos_ids_hint)

    @property
    def defaults(self) -> SamplingParams:
        """The checkpoint's sampling values, else those that its authors recommend."""
        return SamplingParams().checked(self.checkpoint.cfg.recommended)

    def build(self, request: Request) -> Prompt:
        """Raises RequestError or TemplateError."""
        self._refuse_hopeless(request)
        calls = self.calling(request)
        if calls:
            self.grammars.check(calls.constrained(request.params), rules=calls.forced.rules)
        else:
            self.grammars.check(request.params)
        if isinstance(request.messages, str):
            return raw_prompt(self.tokenizer, request.messages + request.prefill)
        template = self._template_for(request)
        if isinstance(template, TemplateError):
            raise template
        return build_prompt(
            self.tokenizer,
            template,
            request.messages,
            think=request.params.think,
            prefill=request.prefill,
            tools=calls.tools if calls else (),
            begun=calls.forced.begun if calls else "",
        )

    def encoded(self, request: Request) -> Request:
        """With its tokens, which need not be made any more. Raises as `build`."""
        prompt = self.build(request)
        return replace(request, ids=array("I", prompt.ids), channel=prompt.channel)

    def check_biases(self, params: SamplingParams) -> None:
        """Raises RequestError for a token that the model does not have."""
        size = self.checkpoint.cfg.vocab
        for token, _ in params.logit_bias:
            if token >= size:
                raise RequestError("bad_parameter", f"logit_bias names token {token}; the last one is {size - 1}")

    def calling(self, request: Request) -> Calling | None:
        """How the answer may call tools. Raises RequestError."""
        if not request.tools and isinstance(request.messages, str):
            return None
        template = self._template_for(request)
        return calling(request, template if isinstance(template, ChatTemplate) else None)

    def _template_for(self, request: Request) -> ChatTemplate | TemplateError:
        tools = request.tools or any(turn.tool_calls for turn in request.messages if not isinstance(turn, str))
        return self._chatml if tools and self._lends_tools else self._template

    @cached_property
    def _chatml(self) -> ChatTemplate:
        return load_template(Path(), "chatml", self.tokenizer)

    def _refuse_hopeless(self, request: Request) -> None:
        asked = request.messages
        texts = (asked,) if isinstance(asked, str) else [turn.content.strip() for turn in asked]
        length, context = sum(map(len, texts)), self.checkpoint.cfg.context
        if length > _CERTAINLY * context and length > _CERTAINLY * context * self.tokenizer.longest_piece:
            raise RequestError(
                "context_overflow",
                f"the prompt has {length:,} characters, which can never be the {context} tokens of the context. "
                "Shorten it.",
            )

    def prompt(self, request: Request) -> list[int]:
        return self.build(request).ids

    def plain_ids(self, text: str) -> list[int]:
        """The tokens of a text without a template and without the token that begins a prompt."""
        return self.tokenizer.encode(text, control=False)

    def token_bytes(self, ident: int) -> bytes:
        return self.tokenizer.piece(ident)

    def pieces(self, ids: Sequence[int]) -> list[tuple[int, str]]:
        return show_prompt(self.tokenizer, ids)


def _template(path: Path, choice: str, tokenizer: Tokenizer) -> ChatTemplate | TemplateError:
    try:
        return load_template(path, choice, tokenizer)
    except TemplateError as error:
        if choice != "auto":
            raise
        return error
