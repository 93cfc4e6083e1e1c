"""How a model starts: what is imported for an answer, and what is done while torch is on its way."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from checkpoints import write_checkpoint
from minicpm_cli.llm.warm import heard_interrupts, warm_up, without_collector

NOT_NEEDED = {"transformers", "triton", "bitsandbytes", "huggingface_hub", "prompt_toolkit", "gguf", "pandas"}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The packages that one answer on a CPU imports, in the order in which they were done."""
    folder = tmp_path_factory.mktemp("start")
    path = write_checkpoint(folder / "model", "minicpm-1b", fmt="safetensors", layers=2)
    kept = {f"MINICPM_{name}_DIR": str(folder / name) for name in ("DATA", "CACHE")}
    command = [sys.executable, "-X", "importtime", "-m", "minicpm_cli", "run", "-m", str(path), "--device", "cpu"]
    done = subprocess.run(
        [*command, "-n", "1", "hello"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=os.environ | kept | {"PYTHONPATH": str(Path(__file__).parents[2])},
        check=True,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return [line.rpartition("|")[2].strip() for line in lines]


def test_an_answer_imports_no_more_than_it_needs(imported: list[str]) -> None:
    assert not {name.partition(".")[0] for name in imported} & NOT_NEEDED


def test_the_tokenizer_is_read_before_torch_is_there(imported: list[str]) -> None:
    assert imported.index("minicpm_cli.llm.prompter") < imported.index("torch") < imported.index("minicpm_cli.llm.llm")


def test_warming_up_is_harmless_whatever_is_missing() -> None:
    """Without torch, without a driver, for a GPU that does not exist."""
    code = (
        "import sys; from minicpm_cli.llm import warm\n"
        "warm.find_spec = lambda name: None; warm._DRIVER = 'libnowhere.so'\n"
        "for device in ('auto', 'cpu', 'cuda', 'cuda:99'):\n"
        "    thread = warm.warm_up(device)\n"
        "    if thread: thread.join()\n"
        "assert 'torch' not in sys.modules"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stderr == ""


def test_there_is_nothing_to_warm_once_torch_is_there() -> None:
    import torch  # noqa: F401

    assert warm_up("auto") is None


def test_the_collector_comes_back() -> None:
    with without_collector():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.unfreeze()


@pytest.mark.parametrize("then", [None, ImportError("cannot load module more than once per process")])
def test_an_interrupt_that_an_import_swallows_is_one_all_the_same(then: Exception | None) -> None:
    def imports() -> None:
        with heard_interrupts():
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            if then:
                raise then

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            imports()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_without_an_interrupt_stays_what_it_is() -> None:
    with pytest.raises(ImportError, match="no torch"), heard_interrupts():
        raise ImportError("no torch")
    with heard_interrupts():
        pass
