"""Every error that a user can meet, as one tree; each class carries the exit code of the process.

MinicpmError
├── UsageError (2)             a flag, a setting or a prompt that cannot work
│   ├── RequestError           one request is wrong; `code` names it in batch error rows
│   └── ContextOverflow        prompt + new tokens do not fit the context
├── ModelError (3)             the model or its files
│   ├── ModelNotFound          no such path, alias or repository; offline and not in the cache
│   ├── UnsupportedModel       an architecture, activation or scheme that this engine does not run
│   ├── ConfigError            config.json is unreadable or contradicts itself
│   ├── WeightsError           a tensor or a weights file is missing, torn, or of the wrong shape or type
│   ├── TokenizerError         the tokenizer's files are missing or cannot be used
│   └── TemplateError          the chat template fails, runs too long or writes too much
├── FileError (3)              an input or output file, a full disk
├── DeviceError (4)            no GPU, too old a driver, a device that does not exist
│   └── OutOfMemory            the model, its cache or a request does not fit
└── Interrupted (130)          Ctrl-C
"""

from __future__ import annotations

from typing import Any


class MinicpmError(Exception):
    """Base of all errors with a message for the user: what happened, why, and what to do."""

    exit_code = 3
    code = "internal"

    def __reduce__(self) -> tuple[Any, ...]:
        """Other processes get it whole, whatever its class is made from."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[MinicpmError], args: tuple[Any, ...], state: dict[str, Any]) -> MinicpmError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class UsageError(MinicpmError):
    exit_code = 2
    code = "bad_parameter"


class RequestError(UsageError):
    """One request cannot be run. `code` is one of the fixed codes of batch error rows."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ContextOverflow(UsageError):
    """A prompt and its new tokens exceed the context.

    `prompt_tokens`, `max_tokens` and `context` are counts of tokens.
    """

    code = "context_overflow"

    def __init__(self, prompt_tokens: int, max_tokens: int, context: int) -> None:
        super().__init__(
            f"prompt {prompt_tokens} + max_new {max_tokens} > ctx {context} tokens: "
            f"{prompt_tokens + max_tokens - context} too many. "
            "Shorten the prompt, lower --max-tokens or raise --ctx."
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.context = context


class ModelError(MinicpmError):
    pass


class ModelNotFound(ModelError):
    pass


class UnsupportedModel(ModelError):
    pass


class ConfigError(ModelError):
    pass


class WeightsError(ModelError):
    pass


class TokenizerError(ModelError):
    pass


class TemplateError(ModelError):
    pass


class FileError(MinicpmError):
    pass


class DeviceError(MinicpmError):
    exit_code = 4


class OutOfMemory(DeviceError):
    pass


class Interrupted(MinicpmError):
    exit_code = 130
