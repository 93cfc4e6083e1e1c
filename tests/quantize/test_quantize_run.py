"""A quantized folder from end to end: it loads again, and it is what was measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from checkpoints import write_checkpoint
from minicpm_cli.errors import UsageError
from minicpm_cli.quantize.run import quantize
from quantize.quantize_jobs import Windows, job_of, loaded, plain_tensors, silent
from steps import all_logits, decoder_of, relative_error

FAMILIES = ("minicpm-2b", "minicpm3-4b", "minicpm-moe-8x2b", "minicpm5-1b")


@pytest.mark.parametrize(
    ("family", "method"),
    [(family, "gptq") for family in FAMILIES] + [("minicpm3-4b", m) for m in ("rtn", "nf4", "int8", "fp8")],
)
def test_the_folder_loads_again_and_computes_with_the_dequantized_weights(
    tmp_path: Path, family: str, method: str
) -> None:
    source = write_checkpoint(tmp_path / "model", family)
    quantize(job_of(source, tmp_path / "out", method=method), silent)
    decoder = loaded(tmp_path / "out")
    plain = decoder_of(decoder.cfg, plain_tensors(tmp_path / "out"))
    ids = [3, 14, 15, 92, 65, 35, 8, 97, 93, 23]
    logits = all_logits(decoder, ids)
    assert relative_error(logits, all_logits(plain, ids)) < 1e-5
    assert 0 < relative_error(logits, all_logits(loaded(source), ids)) < 0.7


@pytest.mark.parametrize("family", FAMILIES)
def test_the_report_says_what_the_written_folder_does(tmp_path: Path, family: str) -> None:
    source = write_checkpoint(tmp_path / "model", family)
    report = quantize(job_of(source, tmp_path / "out"), silent)
    assert report.quality is not None
    for path, told in ((tmp_path / "out", report.quality.ppl), (source, report.quality.ref_ppl)):
        decoder = loaded(path)
        nll = 0.0
        for window in Windows.of(decoder.cfg.vocab).windows:
            scores = all_logits(decoder, list(window.ids)).log_softmax(-1)
            nll -= float(scores[:-1].gather(-1, torch.tensor(window.ids[1:])[:, None]).mean())
        assert told == pytest.approx(math.exp(nll / 2), rel=1e-4)


def test_a_quantized_model_and_an_output_in_use_are_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "model", "minicpm5-1b")
    quantize(job_of(source, tmp_path / "out", method="rtn"), silent)
    with pytest.raises(UsageError, match="not empty"):
        quantize(job_of(source, tmp_path / "out", method="rtn"), silent)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "gptq"
    assert not list(tmp_path.glob("*.partial"))
