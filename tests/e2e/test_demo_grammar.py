"""The demo, asked for JSON: a small model that would never write it by itself at these temperatures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema_rs

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["red", "grün", "青"]}, "minItems": 1, "maxItems": 3},
        "more": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 999}]},
    },
    "required": ["name", "born", "tags", "more"],
    "additionalProperties": False,
}


def test_rows_of_different_schemas_are_valid_and_a_cut_one_is_an_error(tmp_path: Path, demo_gguf: Path) -> None:
    source, out, schema = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "schema.json"))
    schema.write_text(json.dumps(SCHEMA))
    rows = [{"id": str(n), "prompt": f"Person {n}", "temperature": 0.7 * n} for n in range(4)]
    rows += [
        {"id": "yes", "prompt": "Is water wet?", "regex": "(yes|no)"},
        {"id": "cut", "prompt": "x", "max_tokens": 3},
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.toml").touch()
    own = {k: v for k, v in os.environ.items() if not k.startswith("MINICPM_")} | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "MINICPM_CACHE_DIR": str(demo_gguf.parents[1]),
        "MINICPM_CONFIG": str(tmp_path / "config.toml"),
    }
    command = [sys.executable, "-m", "minicpm_cli", "batch", str(source), str(out), "-m", "demo", "--device", "cpu"]
    command += ["--ctx", "512", "--seed", "1", "--schema", str(schema)]
    done = subprocess.run(command, capture_output=True, text=True, env=own, check=False)
    assert done.returncode == 1, done.stderr
    answers = {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert answers.pop("cut")["error"]["code"] == "schema_incomplete"
    assert answers.pop("yes")["text"] in ("yes", "no")
    assert len(answers) == 4
    for row in answers.values():
        assert row["finish_reason"] == "stop"
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(row["text"])), row["text"]
