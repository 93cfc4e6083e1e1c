"""The paths of the server and what happens to a request on each of them."""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from minicpm_cli.errors import MinicpmError
from minicpm_cli.server import asked as given
from minicpm_cli.server.answer import Answer, Form
from minicpm_cli.server.documented import ERRORS, NO_MODEL, STREAM
from minicpm_cli.server.drain import Drain
from minicpm_cli.server.engine_thread import EngineThread
from minicpm_cli.server.faults import FAILED, Fault, Refused, fault_of, invalid, refused
from minicpm_cli.server.guard import Guard
from minicpm_cli.server.loop import Engine, EngineLoop
from minicpm_cli.server.metrics import Metrics
from minicpm_cli.server.responses import add_responses
from minicpm_cli.server.schema import (
    ChatRequest,
    CompletionRequest,
    Detokenized,
    DetokenizeRequest,
    ErrorBody,
    Health,
    Model,
    Models,
    Sampling,
    TokenizeRequest,
    Tokens,
)
from minicpm_cli.server.served import Fronted, Limits, Served
from minicpm_cli.server.shapes import ChatShape, CompletionShape, Head, Shape
from minicpm_cli.text.tools import tools_of
from minicpm_cli.types import Request, SamplingParams

_OWNER = "minicpm-cli"  # whoever serves it: what the model is may be anybody's
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass
class Service:
    """One model and who asks it. `names` are what clients may call it, the first one what it is called.

    Without `engine_behind` it is `llm` itself that runs requests, in a thread of this process.
    """

    llm: Fronted
    names: Sequence[str]
    defaults: SamplingParams
    limits: Limits = field(default_factory=Limits)
    api_key: str | None = None
    engine_behind: Engine | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.llm)
        engine = self.engine_behind or EngineThread(cast("Served", self.llm))
        self.engine = EngineLoop(engine, self.limits.max_queue, self.metrics.hear)
        self.drain = Drain(self.limits.patience)

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            known = " or ".join(f"`{known}`" for known in self.names)
            raise refused(
                404, f"The model `{name}` does not exist; this server has {known}.", "model_not_found", "model"
            )

    def head(self, prefix: str) -> Head:
        return Head(f"{prefix}{secrets.token_hex(12)}", int(time.time()), self.names[0])

    def check(self, model: str | None, count: int = 1) -> None:
        """Before anything is made of a request for `count` answers."""
        self.check_model(model)
        if self.engine.dead:
            raise Refused(FAILED)
        self.engine.check_room(count)

    async def encoded(self, request: Request) -> Request:
        """With its tokens, which are made in another thread. Raises Refused for whatever that finds."""
        try:
            made = await run_in_threadpool(self.llm.encoded, request) if request.ids is None else request
        except MinicpmError:
            raise
        except Exception as error:  # what a text does to a template or tokenizer is that request's fault
            raise refused(400, f"the prompt cannot be read: {type(error).__name__}: {error}") from error
        given.check_length(made, self.llm.info.context)
        return made

    def answer(self, requests: Sequence[Request], asked: Sampling, shape: Shape) -> Answer:
        answer = Answer(self.engine, self.engine.submit(requests), requests, asked.n or 1, shape)
        wants = asked.stream_options is not None and bool(asked.stream_options.include_usage)
        answer.form = Form(bool(asked.stream), wants)
        return answer


def build_app(service: Service) -> FastAPI:
    """The application; its engine loop runs from its startup to its shutdown."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start(asyncio.get_running_loop())
        yield
        await run_in_threadpool(service.engine.stop)  # again, where another server than ours runs this

    app = FastAPI(
        title="minicpm serve", version="1", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    _chat(app, service)
    _completions(app, service)
    add_responses(app, service)
    _tokens(app, service)
    _models(app, service)
    _watching(app, service)
    _faults(app)
    paths = frozenset(str(getattr(route, "path", "")) for route in app.routes)
    app.add_middleware(
        Guard,
        api_key=service.api_key,
        max_body=service.limits.max_body,
        drain=service.drain,
        answered=lambda path, status: service.metrics.answered(path if path in paths else "other", status),
    )
    return app


def _chat(app: FastAPI, service: Service) -> None:
    @app.post(CHAT, responses={**ERRORS, **NO_MODEL, **STREAM}, response_model=None)
    async def chat_completions(asked: ChatRequest) -> Response:
        """Answers a conversation."""
        service.check(asked.model, asked.n or 1)
        params = given.chat_params(asked, service.defaults)
        head = service.head("chatcmpl-")
        prompt = await service.encoded(given.chat_prompt(head.id, asked, params))
        shape = ChatShape(head, service.llm.token_bytes, params.logprobs is not None)
        return service.answer(given.choices(head.id, [prompt], asked.n or 1), asked, shape)


def _completions(app: FastAPI, service: Service) -> None:
    @app.post(COMPLETIONS, responses={**ERRORS, **NO_MODEL, **STREAM}, response_model=None)
    async def completions(asked: CompletionRequest) -> Response:
        """Goes on with a text, or with each of several."""
        service.check(asked.model, asked.n or 1)
        params, head, count = given.completion_params(asked, service.defaults), service.head("cmpl-"), asked.n or 1
        texts = given.prompts_of(asked)
        service.engine.check_room(len(texts) * count)
        prompts = [await service.encoded(_raw(head.id, text, params)) for text in texts]
        echoed = [_echoed(service, text) for text in texts for _ in range(count)] if asked.echo else ()
        shape = CompletionShape(head, service.llm.token_bytes, params.logprobs is not None, echoed)
        return service.answer(given.choices(head.id, prompts, count), asked, shape)


def _raw(ident: str, prompt: str | list[int], params: SamplingParams) -> Request:
    if isinstance(prompt, str):
        return Request(ident, prompt, params)
    return Request(ident, "", params, ids=array("I", prompt))


def _echoed(service: Service, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return b"".join(map(service.llm.token_bytes, prompt)).decode("utf-8", "replace")


def _tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", responses={**ERRORS, **NO_MODEL})
    async def tokenize(asked: TokenizeRequest) -> Tokens:
        """The tokens of a text, or of a conversation as the model would read it."""
        service.check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise refused(400, "give either prompt or messages", "missing_parameter", "prompt")
        ids = await run_in_threadpool(_ids, service, asked)
        texts = [service.llm.token_bytes(i).decode("utf-8", "backslashreplace") for i in ids]
        shown = texts if asked.return_token_strs else None
        return Tokens(count=len(ids), max_model_len=service.llm.info.context, tokens=ids, token_strs=shown)

    @app.post("/detokenize", responses={**ERRORS, **NO_MODEL})
    async def detokenize(asked: DetokenizeRequest) -> Detokenized:
        """The text of tokens."""
        service.check_model(asked.model)
        return Detokenized(prompt=_echoed(service, asked.tokens))


def _ids(service: Service, asked: TokenizeRequest) -> list[int]:
    if asked.messages is not None:
        tools = tools_of(asked.tools)
        return service.llm.prompt(Request("", given.conversation(asked.messages), tools=tools))
    text = asked.prompt or ""
    return service.llm.prompt(Request("", text)) if asked.add_special_tokens else service.llm.plain_ids(text)


def _models(app: FastAPI, service: Service) -> None:
    def model(name: str) -> Model:
        return Model(id=name, created=service.created, owned_by=_OWNER, max_model_len=service.llm.info.context)

    @app.get("/v1/models", responses={401: ERRORS[401]})
    async def models() -> Models:
        """What this server has: one model, by each of its names."""
        return Models(data=[model(name) for name in service.names])

    @app.get("/v1/models/{name:path}", responses={401: ERRORS[401], **NO_MODEL})
    async def one_model(name: str) -> Model:
        service.check_model(name)
        return model(name)

    @app.post("/v1/embeddings", responses={**ERRORS, **NO_MODEL}, status_code=404, response_model=ErrorBody)
    async def embeddings() -> Response:
        """This family makes none."""
        raise refused(404, f"The model `{service.names[0]}` makes no embeddings.", "model_not_found", "model")


def _watching(app: FastAPI, service: Service) -> None:
    @app.get("/health", response_model=Health, responses={503: {"model": Health, "description": "No more requests."}})
    async def health() -> Response:
        """200 while requests are taken; no key is needed."""
        if service.engine.dead:
            return JSONResponse({"status": "failed"}, 503)
        return JSONResponse({"status": "draining"}, 503) if service.drain.begun else JSONResponse({"status": "ok"})

    @app.get("/metrics", response_class=PlainTextResponse, responses={401: ERRORS[401]})
    async def metrics() -> str:
        """For Prometheus."""
        return service.metrics.text(service.engine)


def _faults(app: FastAPI) -> None:
    """Whatever goes wrong is told in OpenAI's shape."""

    def told(fault: Fault) -> Response:
        return JSONResponse(fault.body, fault.status, dict(fault.headers))

    def on(kind: type[Exception], fault: Callable[[Any], Fault]) -> None:
        async def handler(request: HTTPRequest, error: Exception) -> Response:
            return told(fault(error))

        app.add_exception_handler(kind, handler)

    on(RequestValidationError, lambda error: invalid(list(error.errors())))
    on(Refused, fault_of)
    on(MinicpmError, fault_of)
    on(HTTPException, lambda error: Fault(error.status_code, str(error.detail), headers=error.headers or {}))
    on(Exception, fault_of)
