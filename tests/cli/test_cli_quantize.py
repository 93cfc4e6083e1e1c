"""`minicpm quantize` on the command line: what is refused, planned, shown and written."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from checkpoints import write_checkpoint
from minicpm_cli.bench import heldout
from minicpm_cli.cli import quantize_view
from minicpm_cli.quantize import setting
from minicpm_cli.quantize.report import LayerReport, Peak, Report

TEXT = "the hello world and you or re st at on in " * 400


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", "minicpm5-1b")


@pytest.fixture(autouse=True)
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A short held-out text, and a calibration text."""
    monkeypatch.setattr(heldout, "text", lambda: "hello world and the others " * 3000)
    monkeypatch.setattr(heldout, "SIZE", 32)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def small(text: Path) -> list[str]:
    return ["--group-size", "32", "--calib", str(text), "--samples", "40", "--seqlen", "32", "--device", "cpu"]


def test_it_writes_a_folder_and_says_what_it_is_worth(cli: Any, model: Path, text: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    result = cli("quantize", str(model), str(tmp_path / "out"), *small(text), "--report", str(report))
    assert result.code == 0, result.err
    rows = dict(line.split("\t") for line in result.out.splitlines())
    found = json.loads(report.read_text())
    assert rows["recipe"].startswith("gptq w4 g32 sym")
    assert rows["calibration"] == f"{text}, 1280 tokens"
    assert rows["perplexity"].startswith(f"{found['quality']['ppl']:.3f}, original {found['quality']['ref_ppl']:.3f}")
    assert rows["top-1 agreement"] == f"{found['quality']['top1']:.2%}"
    assert f"{found['bits_per_weight']:.2f} bits a weight" in rows["size"]
    assert "planned" in rows["peak memory"]
    assert len(found["layers"]) == 14
    assert (tmp_path / "out" / "config.json").is_file()
    assert "quantizing" in result.err
    assert "layers.0" not in result.err


def test_verbose_shows_each_layer_with_a_bar(cli: Any, model: Path, text: Path, tmp_path: Path) -> None:
    result = cli("quantize", str(model), str(tmp_path / "out"), *small(text), "--method", "rtn", "-v", "--no-evaluate")
    assert result.code == 0, result.err
    lines = [line for line in result.err.splitlines() if line.startswith("model.layers.")]
    assert len(lines) == 14
    assert all("█" in line for line in lines)
    assert "perplexity" not in result.out


def test_a_terminal_gets_a_bar_with_the_time_left(cli: Any, model: Path, text: Path, tmp_path: Path) -> None:
    result = cli("quantize", str(model), str(tmp_path / "out"), *small(text), "--method", "rtn", tty=True)
    assert result.code == 0, result.err
    assert "quantizing" in result.err
    assert "left" in result.err
    quiet = cli(
        "quantize", str(model), str(tmp_path / "o2"), *small(text), "--method", "rtn", "--plain", "-q", tty=True
    )
    assert "quantizing" not in quiet.err


def test_a_plan_is_shown_and_nothing_is_written(cli: Any, model: Path, text: Path, tmp_path: Path) -> None:
    report = tmp_path / "plan.json"
    result = cli("quantize", str(model), str(tmp_path / "out"), *small(text), "--plan", "--report", str(report))
    assert result.code == 0, result.err
    rows = dict(line.split("\t") for line in result.out.splitlines())
    found = json.loads(report.read_text())
    assert rows["peak on cpu"].split(" of ")[0] == f"{found['peak'] / 1e6:.1f} MB"
    assert rows["time"].startswith("about ")
    assert not list(tmp_path.glob("out*"))


def test_the_plan_lists_what_does_not_divide(cli: Any, model: Path, tmp_path: Path) -> None:
    result = cli("quantize", str(model), str(tmp_path / "out"), "--group-size", "128", "--plan", "--device", "cpu")
    assert result.code == 0
    assert "does not divide: q_proj 256x192 (2 layers): 192 inputs do not divide by 128" in result.err
    assert "--group-size 32, 64, 96, 192 would" in result.err


def test_groups_that_other_programs_refuse_are_named_first_and_in_the_report(
    cli: Any, model: Path, text: Path, tmp_path: Path
) -> None:
    said = "GPTQModel and vLLM will not read groups of 96"
    arguments = ["--group-size", "96", "--method", "rtn", "--skip", "[od]*_proj", "--device", "cpu"]
    arguments += ["--no-evaluate"]
    assert said in cli("quantize", str(model), str(tmp_path / "out"), *arguments, "--plan").err
    report = tmp_path / "report.json"
    result = cli("quantize", str(model), str(tmp_path / "out"), *arguments, "--report", str(report))
    assert result.code == 0, result.err
    assert result.err.count(said) == 1
    assert said in " ".join(json.loads(report.read_text())["notes"])


def test_what_does_not_divide_is_an_error_without_a_plan(cli: Any, model: Path, tmp_path: Path) -> None:
    result = cli("quantize", str(model), str(tmp_path / "out"), "--group-size", "128", "--device", "cpu")
    assert result.code == 2
    assert "--group-size 32, 64, 96, 192 would, or leave it out with --skip '*.q_proj'" in result.err
    assert not list(tmp_path.glob("out*"))


def test_a_plan_that_does_not_fit_exits_with_4(
    cli: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setting, "free_bytes", lambda device: 1000)
    result = cli("quantize", str(model), str(tmp_path / "out"), "--group-size", "32", "--plan", "--device", "cpu")
    assert result.code == 4
    assert "does not fit: " in result.err
    result = cli("quantize", str(model), str(tmp_path / "out"), "--group-size", "32", "--device", "cpu")
    assert result.code == 4
    assert "Fewer or shorter rows" in result.err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--method", "awq"], 2, "--method awq"),
        (["--bits", "3"], 2, "3 bits"),
        (["--calib", "nowhere.txt"], 3, "--calib nowhere.txt is no file"),
        (["--report", "no/such/r.json"], 2, "--report no/such/r.json"),
        (["--skip", "*.nothing"], 2, "names no layer"),
        (["--group-size", "32", "--samples", "1", "--seqlen", "8"], 2, "8 calibration tokens are too few"),
        (["--seqlen", "1000000"], 2, "--seqlen 1000000 is more than the model's context"),
    ],
)
def test_what_is_refused(cli: Any, model: Path, tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    result = cli("quantize", str(model), str(tmp_path / "out"), "--device", "cpu", *arguments)
    assert result.code == code, result.err
    assert said in result.err
    assert not (tmp_path / "out").exists()


def test_a_refusal_does_not_stand_in_the_way_of_other_settings(
    cli: Any, model: Path, text: Path, tmp_path: Path
) -> None:
    out = str(tmp_path / "out")
    refused = cli("quantize", str(model), out, *small(text), "--samples", "2")
    assert "64 calibration tokens are too few" in refused.err
    assert cli("quantize", str(model), out, *small(text)).code == 0


def test_an_unknown_model_is_no_usage_error(cli: Any, tmp_path: Path) -> None:
    assert cli("quantize", str(tmp_path / "nothing"), str(tmp_path / "out")).code == 3


def test_a_plot_without_matplotlib_is_refused_at_once(
    cli: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    result = cli("quantize", str(model), str(tmp_path / "out"), "--plot", str(tmp_path / "a.png"))
    assert result.code == 2
    assert "pip install 'minicpm-cli[plot]'" in result.err


def some_report() -> Report:
    kinds = ("self_attn.q_proj", "mlp.experts.0.w1", "mlp.experts.1.w1")
    names = [f"model.layers.{block}.{kind}" for block in (0, 1) for kind in kinds]
    layers = [LayerReport(name, 2, 2, 0.1 * i) for i, name in enumerate(names)]
    peak = Peak(1, 1, 1, 1)
    return Report("m", "o", "r", "cpu", layers, "", 0, None, "", 1, 1, 4.0, 1.0, 0, peak)


def test_curves_are_kinds_of_layers_over_the_blocks() -> None:
    found = quantize_view.curves(some_report())
    assert found.keys() == {"q_proj", "w1"}
    assert found["q_proj"] == [(0, 0.0), (1, pytest.approx(0.3))]
    assert found["w1"] == [(0, pytest.approx(0.15)), (1, pytest.approx(0.45))]


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    quantize_view.write_plot(some_report(), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_bars_have_the_length_of_their_value() -> None:
    assert quantize_view.bar(1.0, 1.0) == "█" * 24
    assert quantize_view.bar(0.5, 1.0) == "█" * 12
    assert quantize_view.bar(0.51, 1.0) == "█" * 12 + "▎"
    assert quantize_view.bar(0.0, 1.0) == ""
    assert quantize_view.bar(0.0, 0.0) == ""
