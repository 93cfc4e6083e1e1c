"""Property tests of text: module-wide tokenizers are fine, and a first call that compiles may be slow."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tiny_tokenizers import MINICPM5, byte_level_folder, sentencepiece_folder, with_post_processor

from minicpm_cli.text.tokenizer import Tokenizer, load_tokenizer

settings.register_profile("text", max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("text")


@pytest.fixture(scope="session")
def minicpm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentencepiece_folder(tmp_path_factory.mktemp("minicpm2"))


@pytest.fixture(scope="session")
def minicpm4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = byte_level_folder(tmp_path_factory.mktemp("minicpm4"), add_bos_token=True)
    return with_post_processor(folder)


@pytest.fixture(scope="session")
def minicpm5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = byte_level_folder(tmp_path_factory.mktemp("minicpm5"), MINICPM5)
    return with_post_processor(folder)


@pytest.fixture(scope="session")
def byte(minicpm5: Path) -> Tokenizer:
    return load_tokenizer(minicpm5)


@pytest.fixture(scope="session")
def spm(minicpm2: Path) -> Tokenizer:
    return load_tokenizer(minicpm2)
