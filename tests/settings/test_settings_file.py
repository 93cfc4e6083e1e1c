"""What `minicpm config set` and `unset` leave in the file: the change alone, for the user's eyes alone."""

from __future__ import annotations

import os
import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicpm_cli import toml_edit
from minicpm_cli.errors import FileError, UsageError
from minicpm_cli.settings_file import ConfigFile, literal

TEXT = """\
# My settings.
top-p = 0.5  # often enough

stop = [
  "a = 1",   # [not a table]
  '''b
[profiles.no]
''',
]

# The fast one.
[profiles.fast]
ctx = 100

[profiles."fast"."strange"]
x = 1
"""


def edited(text: str, name: str, value: Any, profile: str | None, folder: Path) -> str:
    path = folder / "config.toml"
    path.write_text(text)
    file = ConfigFile.read(path, required=True)
    if value is None:
        file.erase(name, profile)
    else:
        file.write(name, value, profile)
    return path.read_text()


@pytest.mark.parametrize(
    ("name", "value", "profile", "old", "new"),
    [
        ("top_p", 0.75, None, "top-p = 0.5  # often enough\n", "top_p = 0.75\n"),
        ("ctx", 7, None, "]\n\n# The fast", "]\nctx = 7\n\n# The fast"),
        ("ctx", 7, "fast", "ctx = 100\n", "ctx = 7\n"),
        ("model", 'a "b"\\ü', "fast", "ctx = 100\n", 'ctx = 100\nmodel = "a \\"b\\"\\\\ü"\n'),
        ("model", "x", "slow", "x = 1\n", 'x = 1\n\n[profiles.slow]\nmodel = "x"\n'),
        ("ctx", None, "fast", "ctx = 100\n", ""),
        ("top_p", None, None, "top-p = 0.5  # often enough\n", ""),
    ],
)
def test_one_line_changes_and_nothing_else(
    tmp_path: Path, name: str, value: Any, profile: str | None, old: str, new: str
) -> None:
    assert TEXT.count(old) == 1
    assert edited(TEXT, name, value, profile, tmp_path) == TEXT.replace(old, new)


def test_a_value_over_several_lines_is_replaced_whole(tmp_path: Path) -> None:
    text = edited(TEXT, "stop", ("x", "y\n"), None, tmp_path)
    assert text.startswith('# My settings.\ntop-p = 0.5  # often enough\n\nstop = ["x", "y\\n"]\n\n# The fast one.')
    assert "stop" not in edited(TEXT, "stop", None, None, tmp_path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "ctx = 7\n"),
        ("# a comment", "# a comment\nctx = 7\n"),
        ("[profiles.a]\nctx = 1\n", "ctx = 7\n\n[profiles.a]\nctx = 1\n"),
        ("# of a\n[profiles.a]\nctx = 1", "ctx = 7\n\n# of a\n[profiles.a]\nctx = 1\n"),
        ("# mine\n\n# of a\n[profiles.a]", "# mine\n\nctx = 7\n\n# of a\n[profiles.a]\n"),
        ("graphs = true", "graphs = true\nctx = 7\n"),
    ],
)
def test_where_the_first_key_goes(tmp_path: Path, before: str, after: str) -> None:
    assert edited(before, "ctx", 7, None, tmp_path) == after


@pytest.mark.parametrize(
    "text", ["profiles.fast.ctx = 1", "profiles = {fast = {ctx = 1}}", "[profiles]\nfast.ctx = 1", "profiles = {}"]
)
def test_ways_to_write_it_that_only_an_editor_can_change(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"config\.toml holds ctx in a way .*; use an editor"):
        ConfigFile.read(path, required=True).write("ctx", 7, "fast")
    assert path.read_text() == text


def test_unset_says_whether_there_was_something(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(TEXT)
    file = ConfigFile.read(path, required=True)
    assert not file.erase("seed")
    assert not file.erase("top_p", "fast")
    assert path.read_text() == TEXT
    assert file.erase("top_p")


@pytest.mark.parametrize("name", ["", "none", "a b", "a.b", "é\n", "x" * 101])
def test_names_that_no_profile_can_have(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a profile"):
        ConfigFile(tmp_path / "config.toml").write("ctx", 1, name)


def test_files_and_folders_are_private_under_any_umask(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "config.toml"
    before = os.umask(0)
    try:
        ConfigFile(path).write("ctx", 1)
        path.chmod(0o644)
        ConfigFile.read(path, required=True).write("ctx", 2)
    finally:
        os.umask(before)
    assert path.read_text() == "ctx = 2\n"
    assert [stat.S_IMODE(p.stat().st_mode) for p in (path, path.parent, path.parent.parent)] == [0o600, 0o700, 0o700]
    assert list(path.parent.iterdir()) == [path]


def test_a_symlink_stays_one(tmp_path: Path) -> None:
    (tmp_path / "dotfiles").mkdir()
    (tmp_path / "dotfiles" / "minicpm.toml").write_text("ctx = 1\n")
    link = tmp_path / "config.toml"
    link.symlink_to(tmp_path / "dotfiles" / "minicpm.toml")
    ConfigFile.read(link, required=True).write("ctx", 2)
    assert link.is_symlink()
    assert (tmp_path / "dotfiles" / "minicpm.toml").read_text() == "ctx = 2\n"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match=r"cannot write .*config\.toml: Not a directory"):
        ConfigFile(tmp_path / "file" / "config.toml").write("ctx", 1)


values = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=3),
)


@settings(deadline=None, derandomize=True)
@given(values)
def test_every_value_reads_back(value: Any) -> None:
    assert tomllib.loads(f"x = {literal(value)}")["x"] == value


keys = st.sampled_from(["ctx", "top-p", "stop", "model"])
comments = st.sampled_from(["", "# x = 1\n", "\n", "# [profiles.a]\n"])
lines = st.tuples(comments, keys, values)
tables = st.dictionaries(
    st.sampled_from(["", "profiles.a", "profiles.b"]), st.lists(lines, max_size=3, unique_by=lambda line: line[1])
)


@settings(deadline=None, derandomize=True)
@given(tables, st.sampled_from([(), ("profiles", "a")]), st.sampled_from(["ctx", "top_p"]), values)
def test_any_file_is_edited_or_refused(written: Any, table: tuple[str, ...], key: str, value: Any) -> None:
    text = ""
    for name, content in sorted(written.items()):
        text += f"[{name}]\n" if name else ""
        text += "".join(f"{comment}{k} = {literal(v)}\n" for comment, k, v in content)
    wanted = tomllib.loads(text)
    place = wanted
    for step in table:
        place = place.setdefault(step, {})
    for old in [k for k in place if k.replace("-", "_") == key]:
        del place[old]
    removed = tomllib.loads(toml_edit.remove(text, table, key))
    assert _filled(removed, table) == wanted
    place[key] = value
    after = toml_edit.assign(text, table, key, literal(value))
    assert tomllib.loads(after) == wanted
    assert [line for line in after.splitlines() if line.startswith("#")] == [
        line for line in text.splitlines() if line.startswith("#")
    ]


def _filled(document: dict[str, Any], table: tuple[str, ...]) -> dict[str, Any]:
    place = document
    for step in table:
        place = place.setdefault(step, {})
    return document
