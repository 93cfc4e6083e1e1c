"""Loading holds the model on its device and about one tensor beside it, whatever the files: measured in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells the anonymous memory")

MIB = 2**20
LARGEST = 2 * 3840 * 1536 * 2  # bytes: gate and up of one layer, which become one matrix
SLACK = 12 * MIB
# Pages of mapped files are not counted: the system takes them back when it needs room. "meta" is a device that takes
# nothing, as a GPU takes nothing of the host; so what is left there is what loading itself holds.
CHILD = """
import json, re, sys, threading, time, torch
from pathlib import Path
from minicpm_cli.llm.checkpoint import Checkpoint
from minicpm_cli.model.loader import load_model

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def load(path, device):
    base, seen, done = anonymous(), [], threading.Event()
    def watch():
        while not done.wait(0.0005):
            seen.append(anonymous())
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        cfg = Checkpoint.read(path).cfg
        layer = lambda done, total: seen.append(anonymous())
        decoder = load_model(path, cfg, torch.device(device), torch.bfloat16, layer)
    finally:
        done.set()
        watcher.join()
    return {"peak": max(seen) - base, "samples": len(seen), "weights": decoder.weight_bytes}

torch.set_num_threads(1)
warm = torch.zeros(8, 8, dtype=torch.bfloat16)
warm @ warm
print(json.dumps([load(Path(sys.argv[1]), device) for device in ("meta", "meta", "cpu")]))
"""


@pytest.mark.parametrize("fmt", ["sharded", "bin", "gguf"])
def test_never_more_than_the_model_and_one_tensor(tmp_path: Path, fmt: str) -> None:
    """Two layers of MiniCPM-1B's true width, 97 MB; the first load also pays for what torch sets up once."""
    path = write_checkpoint(tmp_path, "minicpm-1b", fmt=fmt, layers=2, exact=True)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", CHILD, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    _, elsewhere, here = json.loads(done.stdout)
    assert elsewhere["samples"] >= 2  # one a layer at least
    assert here["weights"] > 90 * MIB
    assert elsewhere["peak"] < LARGEST + SLACK
    assert here["peak"] < here["weights"] + LARGEST + SLACK
