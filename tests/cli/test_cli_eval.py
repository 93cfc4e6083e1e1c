"""minicpm eval as a command, with tiny real models."""

from __future__ import annotations

import io
import json
import math
import platform
import shutil
from pathlib import Path

import pytest
import torch

from checkpoints import write_checkpoint
from minicpm_cli.bench.heldout import heldout
from minicpm_cli.bench.quality import Reader, perplexity, windows
from minicpm_cli.bench.quality_rows import QualityRow
from minicpm_cli.chat.terminal import Terminal
from minicpm_cli.cli import progress
from minicpm_cli.llm.checkpoint import Checkpoint
from minicpm_cli.model.loader import load_model
from minicpm_cli.text.tokenizer import load_tokenizer

TEXT = "The quick brown fox jumps over the lazy dog. 你好，世界。\n" * 5
FP32 = ("--device", "cpu", "--dtype", "fp32")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one shape, one of another vocabulary, and one whose tokenizer gives other ids."""
    root = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        write_checkpoint(root / f"seed{seed}", "minicpm4-0.5b", seed=seed)
    write_checkpoint(root / "other", "minicpm5-1b", vocab=700)
    shutil.copytree(root / "seed0", root / "swapped")
    file = root / "swapped" / "tokenizer.json"
    file.write_text(_swapped(file.read_text()))
    return root


def _swapped(tokenizer: str) -> str:
    """Two letters of the vocabulary have each other's ids."""
    raw = json.loads(tokenizer)
    vocab = raw["model"]["vocab"]
    vocab["o"], vocab["u"] = vocab["u"], vocab["o"]
    return json.dumps(raw)


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return str(file)


def row(cli, *arguments: str) -> QualityRow:
    done = cli("eval", *arguments, *FP32, "--json")
    assert done.code == 0, done.err
    assert done.out.count("\n") == 1
    return QualityRow.from_json(done.out)


def test_a_text_in_sliding_windows(cli, models: Path, text: str) -> None:
    found = row(cli, str(models / "seed0"), "--text", text, "--window", "48", "--stride", "16")
    folder = models / "seed0"
    ids = load_tokenizer(folder).encode(TEXT, control=False)
    decoder = load_model(folder, Checkpoint.read(folder).cfg, torch.device("cpu"), torch.float32)
    expected = perplexity(Reader(decoder), windows(ids, 48, 16))
    assert found.ppl == pytest.approx(expected.value, rel=1e-5)
    assert found.tokens == expected.tokens == len(ids) - 1
    assert (found.text, found.window, found.stride, found.bos, found.against) == (text, 48, 16, False, None)
    assert found.bytes == (folder / "model.safetensors").stat().st_size
    assert found.bits_per_weight == pytest.approx(16, rel=0.05)
    assert found.setting.scheme == "fp32"


def test_without_a_text_six_windows_of_the_built_in_one(cli, models: Path) -> None:
    found = row(cli, "-m", str(models / "seed0"))
    assert (found.windows, found.window, found.stride, found.tokens, found.bos) == (6, 512, None, 6 * 511, False)
    assert found.text == "pydoc topics of Python " + ".".join(platform.python_version_tuple()[:2])
    folder = models / "seed0"
    decoder = load_model(folder, Checkpoint.read(folder).cfg, torch.device("cpu"), torch.float32)
    assert found.ppl == pytest.approx(perplexity(Reader(decoder), heldout(load_tokenizer(folder))).value, rel=1e-5)


def test_a_window_of_ones_own_slides_over_the_built_in_text(cli, models: Path) -> None:
    found = row(cli, str(models / "seed0"), "--window", "40", "--max-windows", "3")
    assert (found.windows, found.window, found.stride, found.tokens) == (3, 40, 20, 39 + 20 + 20)


def test_bos_is_part_of_each_window(cli, models: Path, text: str) -> None:
    found = row(cli, str(models / "seed0"), "--text", text, "--bos", "--window", "33", "--stride", "32")
    ids = load_tokenizer(models / "seed0").encode(TEXT, control=False)
    assert (found.tokens, found.bos) == (len(ids), True)


def test_compared_with_itself_nothing_differs(cli, models: Path, text: str) -> None:
    found = row(cli, str(models / "seed0"), "--text", text, "--against", str(models / "seed0"))
    assert (found.kl, found.top1, found.ref_ppl) == (0.0, 1.0, found.ppl)


def test_compared_with_another_model(cli, models: Path, text: str) -> None:
    one, other = str(models / "seed0"), str(models / "seed1")
    forth, back = row(cli, one, "--text", text, "--against", other), row(cli, other, "--text", text, "--against", one)
    assert forth.against == other
    assert (forth.ppl, forth.ref_ppl) == (back.ref_ppl, back.ppl)
    assert forth.kl is not None
    assert forth.kl > 0.1
    assert forth.top1 == back.top1


def test_the_table_says_what_was_measured(cli, models: Path, text: str) -> None:
    one = str(models / "seed0")
    done = cli("eval", one, "--text", text, "--against", one, *FP32)
    shown = dict(line.split("\t") for line in done.out.splitlines())
    assert math.isfinite(float(shown["perplexity"]))
    assert shown["perplexity"] == shown["its perplexity"]
    assert shown["KL divergence"] == "0 nats a token, from the reference"
    assert shown["top-1 agreement"] == "100.00%"
    assert shown["text"] == f"{text}, no BOS"
    assert shown["files"].endswith("bits a weight")
    assert done.err == ""


def test_progress_is_on_stderr(cli, models: Path, text: str) -> None:
    arguments = ("eval", str(models / "seed0"), "--text", text, *FP32)
    done = cli(*arguments, tty=True)
    assert "windows" in done.err
    assert "perplexity" in done.out
    assert "windows" not in cli(*arguments, "-q", tty=True).err


def test_a_text_from_a_pipe(cli, models: Path) -> None:
    done = cli("eval", str(models / "seed0"), "--text", "-", *FP32, "--json", stdin=TEXT.encode())
    assert QualityRow.from_json(done.out).text == "-"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--window", "1"], "--window is 1; it must be at least 2"),
        (["--stride", "0"], "--stride is 0"),
        (["--max-windows", "0"], "--max-windows is 0"),
        (["--window", "8", "--stride", "9"], "it must be at most 8"),
        (["--window", "8", "--stride", "8", "--bos"], "it must be at most 7"),
        (["-m", "another"], "given twice"),
        (["--text", "-"], "- is empty"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_loads(cli, arguments: list[str], said: str) -> None:
    done = cli("eval", "no-such-model", *arguments)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


@pytest.mark.parametrize(
    ("content", "arguments", "code", "said"),
    [
        (b"", [], 2, "is empty"),
        (b"good \xff bad", [], 2, "byte 0xff at offset 5"),
        (None, [], 3, "cannot read"),
        (b"a", [], 2, "too short: 1 tokens, and at least 2 are needed"),
        (TEXT.encode(), ["--window", "140000"], 2, "windows of 140000 tokens do not fit the context of"),
        (TEXT.encode(), ["--window", "64", "--ctx", "63"], 2, "63 tokens"),
    ],
)
def test_texts_that_cannot_be_read(
    cli, models: Path, tmp_path: Path, content: bytes | None, arguments: list[str], code: int, said: str
) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    done = cli("eval", str(models / "other"), "--text", str(file), *arguments, *FP32)
    assert (done.code, done.out) == (code, "")
    assert said in done.err


def test_a_small_context_has_no_room_for_the_built_in_windows(cli, models: Path) -> None:
    done = cli("eval", str(models / "seed0"), "--ctx", "511", *FP32)
    assert done.code == 2
    assert "windows of 512 tokens do not fit" in done.err


@pytest.mark.parametrize(("other", "said"), [("other", "vocabularies have"), ("swapped", "tokenizers cut the text")])
def test_models_of_other_tokens_are_not_compared(cli, models: Path, text: str, other: str, said: str) -> None:
    done = cli("eval", str(models / "seed0"), "--text", text, "--against", str(models / other), *FP32)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


def test_quantizing_at_load_is_measured_against_the_model_as_it_is(cli, models: Path, text: str) -> None:
    one = str(models / "seed0")
    found = row(cli, one, "--text", text, "--against", one, "--quantize", "w4")
    assert found.setting.scheme.startswith("w4")
    assert found.kl is not None
    assert 1e-4 < found.kl < 0.5
    assert (found.bytes, found.bits_per_weight) == (None, None)


def test_the_bar_says_how_long_it_will_still_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    err = io.StringIO()
    monkeypatch.setattr(err, "isatty", lambda: True)
    with progress.ProgressLine(Terminal(io.StringIO(), err)) as bar:
        bar("reading", 0, 300, "windows")
        now[0] += 10
        bar("reading", 30, 300, "windows")
        now[0] += 90
        bar("reading", 300, 300, "windows")
    drawn = err.getvalue().split("\r\x1b[2K")
    assert drawn[1] == "reading [........................] 0/300 windows"
    assert drawn[2] == "reading [##......................] 30/300 windows, 1:30 left"
    assert drawn[3].endswith("300/300 windows, 0:00 left")


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        (56, "loading a-model [############............] 12/24 layers"),
        (55, "loading a-model 12/24 layers"),
        (20, "loadi… 12/24 layers"),
        (10, "… 12/24 l"),
    ],
)
def test_a_bar_never_wraps(monkeypatch: pytest.MonkeyPatch, columns: int, row: str) -> None:
    err = io.StringIO()
    monkeypatch.setattr(err, "isatty", lambda: True)
    monkeypatch.setattr(Terminal, "columns", columns)
    with progress.ProgressLine(Terminal(io.StringIO(), err)) as bar:
        bar("loading a-model", 12, 24, "layers")
    assert err.getvalue().split("\r\x1b[2K")[1] == row
