"""Which files of a hub repository a model needs, and how a repository is named. No network, no disk."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch

from minicpm_cli.errors import ModelNotFound

# "owner/name", with an optional file of that repository and an optional revision.
_NAME = re.compile(r"(?P<repo>\w[\w.-]*/[\w.-]+?)(?:/(?P<file>[^@]+\.gguf))?(?:@(?P<revision>\w[\w./-]*))?")
_CONFIGS = (
    "config.json",
    "generation_config.json",
    "quantize_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)
_SAFETENSORS = ("*.safetensors", "*.safetensors.index.json")
_BIN = ("pytorch_model*.bin", "pytorch_model*.bin.index.json")
_ADAPTER, _ADAPTER_WEIGHTS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
_NOT_THE_MODEL = ("*.py", "adapter_*", "consolidated*")  # code, LoRA adapters, a second copy in another layout


class NotAModel(ModelNotFound):
    """A repository that holds a LoRA adapter."""


@dataclass(frozen=True, slots=True)
class RepoName:
    """`file` is a .gguf file of the repository, `revision` a branch, a tag or a commit; mostly both are None.

    `adapter`: it is to be a LoRA adapter, not a model.
    """

    text: str
    repo: str
    file: str | None = None
    revision: str | None = None
    adapter: bool = False

    @classmethod
    def parse(cls, text: str) -> RepoName | None:
        """None when `text` cannot be the name of a repository."""
        match = _NAME.fullmatch(text)
        if match is None or ".." in text:
            return None
        return cls(text, match["repo"], match["file"], match["revision"])

    def wanted(self, names: Iterable[str]) -> list[str]:
        """Of the repository's files `names`, those to have. Raises ModelNotFound where they make no model."""
        names = list(names)
        if self.adapter:
            return adapter_files(self.repo, names)
        if self.file is None:
            return wanted_files(self.repo, names)
        if self.file not in names:
            ggufs = ", ".join(_ggufs(names)) or "none"
            raise ModelNotFound(f"{self.repo} has no file {self.file}; its GGUF files: {ggufs}")
        return [self.file]


def wanted_files(repo: str, names: list[str]) -> list[str]:
    """What a model needs of a repository: never code, and .bin weights only where there are no safetensors."""
    top = [n for n in names if "/" not in n and not _matches(n, _NOT_THE_MODEL)]
    safetensors, binaries = ([n for n in top if _matches(n, kind)] for kind in (_SAFETENSORS, _BIN))
    weights = safetensors if any(n.endswith(".safetensors") for n in safetensors) else binaries
    if not any(n.endswith((".safetensors", ".bin")) for n in weights):
        raise _no_weights(repo, names)
    if "config.json" not in top:
        raise ModelNotFound(f"{repo} has weights but no config.json; it is not a complete model")
    return [n for n in top if _matches(n, _CONFIGS)] + weights


def adapter_files(repo: str, names: Iterable[str]) -> list[str]:
    """What a LoRA adapter needs of a repository. Raises ModelNotFound."""
    there = set(names)
    weights = next((name for name in _ADAPTER_WEIGHTS if name in there), None)
    if _ADAPTER not in there or weights is None:
        wanted = f"{_ADAPTER} and {' or '.join(_ADAPTER_WEIGHTS)}"
        raise ModelNotFound(f"{repo} is no LoRA adapter: it does not hold {wanted} at its top")
    return [_ADAPTER, weights]


def _no_weights(repo: str, names: list[str]) -> ModelNotFound:
    ggufs = _ggufs(names)
    if ggufs:
        return ModelNotFound(
            f"{repo} holds GGUF files: name one, such as -m {repo}/{ggufs[0]}. All: {', '.join(ggufs)}"
        )
    if _ADAPTER in names:
        return NotAModel(f"{repo} is a LoRA adapter, not a model: give its model with -m, and --lora {repo}")
    return ModelNotFound(f"{repo} holds no weights (no .safetensors, pytorch_model*.bin or .gguf file)")


def _ggufs(names: list[str]) -> list[str]:
    return sorted(n for n in names if n.endswith(".gguf"))


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
