"""The README says what is so: its tables are generated, its commands exist, its map names what is there."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from minicpm_cli.bench.command import COLUMNS
from minicpm_cli.bench.speed import WORKLOADS
from project import readme

TEXT = readme.README.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["commands", "benchmarks", "kernels", "quality", "interop"])
def test_a_generated_block_is_up_to_date(name: str) -> None:
    content = {name: getattr(readme, name)()}
    assert readme.filled(TEXT, content) == TEXT, "run `python tests/project/readme.py`"


def test_a_block_is_replaced_whole_and_nothing_else() -> None:
    before = "a\n<!-- x: why -->\nold\nold\n<!-- /x -->\nb <!-- y -->"
    assert readme.filled(before, {"x": "new | \\1"}) == "a\n<!-- x: why -->\n\nnew | \\1\n\n<!-- /x -->\nb <!-- y -->"


def test_a_block_that_is_not_there_is_an_error() -> None:
    with pytest.raises(AssertionError, match="needs the block z"):
        readme.filled("nothing", {"z": ""})


def test_published_rows_are_repeated() -> None:
    """Where there are two runs, the table says so."""
    expected = {name: workload.most for name, workload in WORKLOADS.items() if workload.most}
    rows = [row for row in readme.speed_rows() if len(row.runs) < expected.get(row.workload, 2)]
    assert [row.to_json() for row in rows] == []


def test_published_rows_are_of_workloads_that_exist() -> None:
    rows = [row for row in readme.speed_rows() if row.limit is None]
    assert {row.workload for row in rows} <= set(COLUMNS)


def test_pictures_are_there() -> None:
    names = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", TEXT)
    assert len(names) == 2
    for name in names:
        assert ElementTree.fromstring((readme.ROOT / name).read_text(encoding="utf-8")).tag.endswith("svg")


def test_ci_runs_the_readmes_command() -> None:
    command = "bash .ci/check"
    assert f"```\n{command}\n```" in TEXT
    assert (readme.ROOT / ".ci" / "run").read_text().rstrip().endswith(command)


def test_every_package_is_on_the_map() -> None:
    package = readme.ROOT / "minicpm_cli"
    there = {path.parent.name for path in package.glob("*/__init__.py")}
    missing = {name for name in there if not re.search(rf"^  {name}/", TEXT, re.MULTILINE)}
    assert not missing
