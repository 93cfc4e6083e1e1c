"""GPTQModel and transformers (through optimum) against this package, both ways. Run once by hand: they pull in too much
for every test run.

    pip install optimum && pip install gptqmodel        # and the package with its [test] extra
    GPTQMODEL_CPU_WORKERS=2 python tests/interop/by_hand.py

Prints one JSON line: versions, and for every folder and reader the largest difference of the logits from ours (float32
weights and products here, float16 there) and their relative norm. Exit code 1 if anything failed or differs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "interop")]

import torch  # noqa: E402
from folders import IDS, TEXT, logits_of, open_theirs, our_logits, quantize, write_plain  # noqa: E402
from torch import Tensor  # noqa: E402

from steps import relative_error  # noqa: E402

PACKAGES = ("torch", "transformers", "optimum", "gptqmodel")
# Of float16 products and of weights rounded to float16; a wrong zero point or order gives 0.1 and more.
TOLERANCE = 5e-3
W4 = ("--bits", "4", "--group-size", "32")
WRITTEN_BY_US = {
    "gptq w4 g32 sym": ("--method", "gptq", *W4),
    "gptq w4 g32 asym": ("--method", "gptq", *W4, "--asym"),
    "gptq w4 g32 sym act-order": ("--method", "gptq", *W4, "--act-order"),
    "gptq w4 g32 asym act-order": ("--method", "gptq", *W4, "--act-order", "--asym"),
    "rtn w4 g32 sym": ("--method", "rtn", *W4),
    "rtn w4 g32 asym": ("--method", "rtn", *W4, "--asym"),
    "rtn w8 g64 sym": ("--method", "rtn", "--bits", "8", "--group-size", "64"),
    "rtn w8 g64 asym": ("--method", "rtn", "--bits", "8", "--group-size", "64", "--asym"),
    "rtn w4 row sym": ("--method", "rtn", "--bits", "4", "--group-size", "-1"),
    "rtn w4 g32 sym, down_proj plain": ("--method", "rtn", *W4, "--skip", "*.down_proj"),
    "rtn w4 g32 sym, one down_proj plain": ("--method", "rtn", *W4, "--skip", "*.0.mlp.down_proj"),
    "rtn w4 g32 sym, head w8": ("--method", "rtn", *W4, "--head-bits", "8"),
}
# transformers takes no layer on its own and no head, and says so at most in its log; `minicpm quantize` warns of it.
UNREAD_BY_TRANSFORMERS = ("rtn w4 g32 sym, one down_proj plain", "rtn w4 g32 sym, head w8")
WRITTEN_BY_GPTQMODEL: dict[str, dict[str, Any]] = {
    "w4 g32 sym": {"bits": 4, "group_size": 32},
    "w4 g32 sym desc_act": {"bits": 4, "group_size": 32, "desc_act": True},
    "w4 g32 asym": {"bits": 4, "group_size": 32, "sym": False},
    "w4 g32 asym desc_act": {"bits": 4, "group_size": 32, "sym": False, "desc_act": True},
    "w4 g32 asym gptq_v2": {"bits": 4, "group_size": 32, "sym": False, "format": "gptq_v2"},
    "w8 g64 sym": {"bits": 8, "group_size": 64},
    "w4 row sym": {"bits": 4, "group_size": -1, "act_group_aware": False},
    "awq gemm w4 g32": {"bits": 4, "group_size": 32, "sym": False, "method": "awq", "format": "gemm"},
}
WRITTEN_BY_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "w4 g32 sym": {"bits": 4, "group_size": 32},
    "w4 g32 asym desc_act": {"bits": 4, "group_size": 32, "sym": False, "desc_act": True},
    "w8 g64 sym": {"bits": 8, "group_size": 64},
}
Writer = Callable[[Path, Path, dict[str, Any]], None]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):  # GPTQModel prints its banner
        plain = write_square(Path(folder) / "plain")
        ours = {name: read_by_them(plain, Path(folder), args) for name, args in WRITTEN_BY_US.items()}
        theirs = {
            writer.__name__: {name: read_by_us(plain, Path(folder), writer, config) for name, config in configs.items()}
            for writer, configs in ((gptqmodel, WRITTEN_BY_GPTQMODEL), (transformers, WRITTEN_BY_TRANSFORMERS))
        }
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": sys.version.split()[0],
        "versions": {name: version(name) for name in PACKAGES},
        "written by us, read by": ours,
        "read by us, written by": theirs,
    }
    print(json.dumps(record))
    cells = [cell for rows in (ours, theirs) for row in rows.values() for cell in row.values()]
    return int(any("error" in cell or cell["relative"] > TOLERANCE for cell in cells))


def write_square(folder: Path) -> Path:
    """Of sizes that GPTQModel can do: its AWQ wants outputs that 64 divides, its CPU kernel rows of at most 256."""
    from transformers import LlamaConfig, LlamaForCausalLM

    write_plain(folder, torch.float16)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 16, "initializer_range": 0.1}
    config = LlamaConfig.from_pretrained(folder, **sizes)
    LlamaForCausalLM(config).half().save_pretrained(folder)
    return folder


def read_by_them(plain: Path, folder: Path, args: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    out = Path(tempfile.mkdtemp(dir=folder)) / "ours"
    quantize(plain, out, *args)
    readers: dict[str, Callable[[], torch.nn.Module]] = {
        "transformers": lambda: open_theirs(out, torch.float16),
        "gptqmodel": lambda: open_with_gptqmodel(out),
    }
    if args in [WRITTEN_BY_US[name] for name in UNREAD_BY_TRANSFORMERS]:
        del readers["transformers"]
    return {name: difference(lambda read=read: (logits_of(read()), our_logits(out))) for name, read in readers.items()}


def read_by_us(plain: Path, folder: Path, write: Writer, config: dict[str, Any]) -> dict[str, Any]:
    out = Path(tempfile.mkdtemp(dir=folder)) / "theirs"

    def logits() -> tuple[Tensor, Tensor]:
        write(plain, out, config)
        return our_logits(out), logits_of(open_with_gptqmodel(out))

    return difference(logits)


def difference(pair: Callable[[], tuple[Tensor, Tensor]]) -> dict[str, Any]:
    try:
        actual, expected = pair()
    except Exception as error:  # noqa: BLE001 -- a row of the record, whatever it is
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    largest = float((actual - expected).abs().max())
    return {"largest": round(largest, 6), "relative": round(relative_error(actual, expected), 6)}


def open_with_gptqmodel(folder: Path) -> torch.nn.Module:
    from gptqmodel import GPTQModel

    return GPTQModel.load(str(folder), device="cpu", dtype=torch.float16).model


def gptqmodel(plain: Path, out: Path, config: dict[str, Any]) -> None:
    from gptqmodel import GPTQModel, QuantizeConfig

    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(0, max(IDS), (16, 256), generator=draw).tolist()
    model = GPTQModel.load(str(plain), QuantizeConfig(**config))
    model.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows], batch_size=1)
    model.save(str(out))


def transformers(plain: Path, out: Path, config: dict[str, Any]) -> None:
    from transformers import AutoTokenizer, GPTQConfig

    calibration = GPTQConfig(dataset=[TEXT] * 8, tokenizer=AutoTokenizer.from_pretrained(plain), **config)
    open_theirs(plain, torch.float16, device_map="cpu", quantization_config=calibration).save_pretrained(out)
    AutoTokenizer.from_pretrained(plain).save_pretrained(out)  # GPTQModel opens no folder without


if __name__ == "__main__":
    sys.exit(main())
