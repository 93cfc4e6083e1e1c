"""Where a value comes from, which source wins, and what is refused with its place, value and range."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from minicpm_cli.errors import UsageError
from minicpm_cli.settings import LoadOptions, Settings, calm_waiting
from minicpm_cli.types import SamplingParams


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def load(config: Path, flags: dict[str, Any] | None = None, text: str = "", **environ: str) -> Settings:
    config.write_text(text, encoding="utf-8")
    return Settings.load(flags, environ, config)


def test_defaults(config: Path) -> None:
    settings = load(config)
    assert settings.options == LoadOptions()
    assert settings.sampling == {}
    assert {row.origin for row in settings.rows} == {"default"}
    assert settings.model_is_default
    assert settings.cache_dir != settings.data_dir


def test_every_load_option_and_sampling_parameter_can_be_set(config: Path) -> None:
    names = {row.name for row in load(config).rows}
    assert names >= {f.name for f in fields(LoadOptions)} | {f.name for f in fields(SamplingParams)}


def test_each_source_overrides_the_weaker_ones(config: Path) -> None:
    text = "ctx = 1000\nmax_seqs = 2\ntop-p = 0.5\ntemperature = 0.1\n"
    environ = {"MINICPM_MAX_SEQS": "3", "MINICPM_TEMPERATURE": "0.2", "MINICPM_TOP_P": ""}
    settings = load(config, {"temperature": 0.3, "top_k": None}, text, **environ)
    assert (settings.options.ctx, settings.options.max_seqs) == (1000, 3)
    assert settings.sampling == {"top_p": 0.5, "temperature": 0.3}
    assert settings.origin("ctx") == f"config file {config}"
    assert settings.origin("max_seqs") == "MINICPM_MAX_SEQS"
    assert settings.origin("temperature") == "flag --temperature"
    assert settings.origin("top_p") == f"config file {config}"  # an empty variable is not set
    assert settings.origin("top_k") == "default"


def test_a_flag_that_says_no_is_named_as_it_was_typed(config: Path) -> None:
    settings = load(config, {"graphs": False, "think": False, "memory_fraction": 0.5})
    assert settings.origin("graphs") == "flag --no-graphs"
    assert settings.origin("think") == "flag --no-think"
    assert settings.origin("memory_fraction") == "flag --memory-fraction"
    assert settings.options.graphs is False
    assert settings.sampling["think"] is False


def test_strings_are_read_as_what_they_spell(config: Path, tmp_path: Path) -> None:
    settings = load(
        config,
        MINICPM_CTX="4096",
        MINICPM_GRAPHS="off",
        MINICPM_HEAD_BITS="8",
        MINICPM_TEMPERATURE="1e-1",
        MINICPM_THINK="Yes",
        MINICPM_STOP="12",
        MINICPM_QUANTIZE="none",
        MINICPM_MAX_SEQS="auto",
        MINICPM_THREADS="2",
        MINICPM_CACHE_DIR=str(tmp_path),
        MINICPM_MODEL="12",
    )
    options = settings.options
    assert (options.ctx, options.graphs, options.head_bits, options.quantize, options.max_seqs) == (
        4096,
        False,
        8,
        None,
        None,
    )
    assert options.model == "12"
    assert settings.sampling == {"temperature": 0.1, "think": True, "stop": ("12",)}
    assert (settings.threads, settings.cache_dir) == (2, tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("temperature", "hot", r"temperature is 'hot'; it must be a number in \[0, inf\)"),
        ("temperature", "nan", "a number in"),
        ("temperature", "-1", "a number in"),
        ("top_p", "1.5", r"\[0, 1\]"),
        ("ctx", "0", "ctx is '0'; it must be a whole number from 1 to .* or auto"),
        ("ctx", "1.5", "whole number"),
        ("ctx", "9" * 30, "whole number"),
        ("memory_fraction", "0", r"in \(0, 1\]"),
        ("memory_fraction", "nan", r"in \(0, 1\]"),
        ("head_bits", "6", "4, 8 or 16"),
        ("dtype", "bf17", "auto, bf16, fp16, fp32"),
        ("quantize", "w3", "w4, w8, nf4, int8, fp8, none"),
        ("kv_dtype", "int4", "auto, fp8, int8"),
        ("device", "gpu", "auto, cpu, cuda or cuda:N"),
        ("device", "cuda:x", "cuda:N"),
        ("graphs", "maybe", "true or false"),
        ("think", "maybe", "true or false"),
        ("chat_template", "/no/such.jinja", "auto, chatml, minicpm or a file that exists"),
        ("lora", "/no/such", "a directory that exists"),
        ("lora", "no-such", "a hub repo id"),
        ("threads", "0", "from 1 to 4096"),
        ("seed", "-1", "whole number"),
        ("lookup", "33", "a whole number from 0 to 32 or auto"),
    ],
)
def test_refused_from_every_source(config: Path, name: str, value: str, wanted: str) -> None:
    origins = {f"MINICPM_{name.upper()}": ({}, "", {f"MINICPM_{name.upper()}": value})}
    origins[f"flag --{name.replace('_', '-')}"] = ({name: value}, "", {})
    origins[f"config file {config}"] = ({}, f'{name} = "{value}"', {})
    for origin, (flags, text, environ) in origins.items():
        with pytest.raises(UsageError, match=wanted) as caught:
            load(config, flags, text, **environ)
        assert str(caught.value).startswith(f"{origin}: {name} is ")
        assert caught.value.exit_code == 2


@pytest.mark.parametrize("value", [True, 1.0, [1], "x"])
def test_typed_values_of_the_wrong_type(config: Path, value: Any) -> None:
    with pytest.raises(UsageError, match=r"flag --ctx: ctx is .*whole number"):
        load(config, {"ctx": value})


def test_a_wrong_value_is_refused_even_where_a_stronger_source_replaces_it(config: Path) -> None:
    with pytest.raises(UsageError, match="config file"):
        load(config, {"ctx": 5}, "ctx = -1")


def test_unknown_keys_are_refused_with_the_nearest_name(config: Path) -> None:
    with pytest.raises(UsageError, match=r"config file .*unknown setting 'temprature'\. Did you mean 'temperature'\?"):
        load(config, text="temprature = 1")
    with pytest.raises(UsageError, match=r"flags: unknown setting 'xyzzy'\. Known: model, device"):
        load(config, {"xyzzy": 1})


def test_a_slip_in_a_variable_is_noted_and_strangers_are_left_alone(config: Path) -> None:
    settings = load(config, MINICPM_TEMPERATUR="1", MINICPM_XYZZY="1", OTHER="2")
    assert settings.notes == ("MINICPM_TEMPERATUR is not a setting and is ignored; did you mean MINICPM_TEMPERATURE?",)


def test_config_files_that_cannot_be_used(config: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.toml is not valid TOML: .*line 2"):
        load(config, text="ctx = 1\nctx = \nmax_seqs = 1")
    with pytest.raises(UsageError, match=r"config\.toml is not valid TOML: .*recursion"):
        load(config, text="ctx = " + "[" * 50_000)
    config.write_bytes(b'model = "\xff"')
    with pytest.raises(UsageError, match="not valid TOML"):
        Settings.load({}, {}, config)
    with pytest.raises(UsageError, match="cannot be read"):
        Settings.load({}, {}, tmp_path)
    with pytest.raises(UsageError, match=r"gone\.toml does not exist"):
        Settings.load({}, {"MINICPM_CONFIG": str(tmp_path / "gone.toml")})


def test_a_config_file_with_a_byte_order_mark(config: Path) -> None:
    config.write_bytes(b"\xef\xbb\xbfctx = 7\n")
    assert Settings.load({}, {}, config).options.ctx == 7


def test_the_default_config_file_need_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert Settings.load({}, {}).options == LoadOptions()


def test_the_terminal_conventions(config: Path) -> None:
    assert load(config).color
    assert not load(config, NO_COLOR="1").color
    assert load(config, NO_COLOR="").color
    assert load(config, NO_COLOR="1", MINICPM_COLOR="1").color
    dumb = load(config, TERM="dumb")
    assert dumb.plain
    assert dumb.origin("plain") == "TERM=dumb"


def test_a_template_file_and_a_home_folder(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "t.jinja").touch()
    (tmp_path / "adapter").mkdir()
    settings = load(config, {"chat_template": "~/t.jinja", "lora": "~/adapter"})
    assert settings.options.chat_template == str(tmp_path / "t.jinja")
    assert settings.options.lora == str(tmp_path / "adapter")
    assert load(config, {"lora": "owner/adapter@v1"}).options.lora == "owner/adapter@v1"
    assert load(config, {"chat_template": "chatml"}).options.chat_template == "chatml"


def test_biases(config: Path) -> None:
    wanted = ((5, -100.0), (7, 0.5))
    assert load(config, {"logit_bias": ["7=0.5", "5=-100"]}).sampling["logit_bias"] == wanted
    assert load(config, text="logit_bias = [[5, -100.0], [7, 0.5]]").sampling["logit_bias"] == wanted
    assert load(config, text="[logit_bias]\n5 = -100\n7 = 0.5").sampling["logit_bias"] == wanted
    assert load(config, text='logit_bias = \'{"5": -100, "7": 0.5}\'').sampling["logit_bias"] == wanted
    with pytest.raises(UsageError, match=r"logit_bias is '\{'; it must be ids of tokens"):
        load(config, text="logit_bias = '{'")


def test_several_stops(config: Path) -> None:
    assert load(config, {"stop": ("a", "b")}).sampling["stop"] == ("a", "b")
    assert load(config, text='stop = ["a", "b"]').sampling["stop"] == ("a", "b")
    assert "stop" not in load(config, {"stop": ()}).sampling


def test_importing_is_cheap() -> None:
    heavy = "('torch', 'huggingface_hub', 'transformers', 'tokenizers', 'numpy', 'rich')"
    code = f"import sys, minicpm_cli.settings; print([n for n in {heavy} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"GOMP_SPINCOUNT": "1000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_threads_wait_calmly_unless_the_user_says_otherwise(before: dict[str, str], after: dict[str, str]) -> None:
    environ = dict(before)
    calm_waiting(environ)
    assert environ == after


@pytest.mark.parametrize(
    ("given", "meant"), [("bfloat16", "bf16"), ("half", "fp16"), ("float32", "fp32"), ("auto", "auto")]
)
def test_a_dtype_may_have_torchs_name(given: str, meant: str) -> None:
    assert Settings.load({"dtype": given}, environ={}).options.dtype == meant
