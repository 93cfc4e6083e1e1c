"""minicpm config as a user types it: what it shows, what it writes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def config(home: Path) -> Path:
    return home / "config.toml"


def test_set_shows_what_is_so_now(cli, config: Path) -> None:
    done = cli("config", "set", "top-p", "0.5")
    assert (done.code, done.out) == (0, "")
    assert done.err == f"minicpm: top_p is 0.5 now (config file {config})\n"
    assert config.read_text() == "top_p = 0.5\n"
    assert cli("config", "get", "top_p").out == "0.5\n"
    assert cli("config", "set", "-q", "top-p", "0.6").err == ""


def test_values_are_checked_as_flags_are_and_nothing_is_written(cli, config: Path) -> None:
    for name, value, said in (
        ("temperature", "hot", "minicpm config set: temperature is 'hot'; it must be a number in [0, inf)"),
        ("temprature", "1", "Did you mean 'temperature'?"),
        ("dtype", "int3", "one of auto, bf16, fp16, fp32"),
        ("chat_template", "/no/such", "a file that exists"),
        ("profile", "fast", "unknown profile 'fast'"),
    ):
        done = cli("config", "set", name, value)
        assert done.code == 2
        assert said in done.err
    assert cli("config", "set", "model", "a", "b").code == 2
    assert config.read_text() == ""


def test_numbers_below_zero_and_lists(cli, config: Path) -> None:
    assert cli("config", "set", "presence_penalty", "-1").code == 0
    assert cli("config", "set", "stop", "User:", "###").code == 0
    assert cli("config", "set", "ctx", "auto").code == 0
    assert config.read_text() == 'presence_penalty = -1.0\nstop = ["User:", "###"]\nctx = "auto"\n'
    assert cli("config", "get", "stop").out == '["User:", "###"]\n'
    assert cli("config", "get", "seed").out == "\n"
    assert cli("config", "get", "data_dir").out == f"{config.parent / 'data'}\n"
    assert cli("config", "get", "graphs").out == "true\n"


def test_biases_of_tokens(cli, config: Path) -> None:
    assert cli("config", "set", "logit_bias", "9=-100", "5=1.5").code == 0
    assert config.read_text() == "logit_bias = [[5, 1.5], [9, -100.0]]\n"
    assert cli("config", "set", "logit_bias", '{"7": 1}').code == 0
    assert cli("config", "get", "logit_bias").out == "[[7, 1.0]]\n"


def test_a_key_is_shown_to_whoever_asks_for_it_by_name(cli, config: Path) -> None:
    assert cli("config", "set", "api_key", "s3cret").err == f'minicpm: api_key is "***" now (config file {config})\n'
    assert cli("config", "get", "api_key").out == "***\n"
    assert cli("config", "get", "--reveal", "api_key").out == "s3cret\n"
    assert "s3cret" not in cli("config").out + cli("config", "--json").out
    cli("config", "unset", "api_key")
    assert cli("config", "get", "api_key").out == "\n"


def test_a_profile_is_written_and_used(cli, config: Path) -> None:
    assert cli("config", "set", "--profile", "fast", "max_tokens", "2").code == 0
    assert cli("config", "--profile", "fast", "set", "seed", "5").code == 0
    assert config.read_text() == "[profiles.fast]\nmax_tokens = 2\nseed = 5\n"
    assert cli("run", "--profile", "fast", "one two three").out == "You said:\n"
    assert cli("config", "set", "profile", "fast").code == 0
    shown = json.loads(cli("config", "--json").out)
    assert shown["profile"] == {"value": "fast", "origin": f"config file {config}"}
    assert shown["seed"] == {"value": 5, "origin": f"profile fast in {config}"}
    assert "profiles: fast" in cli("config").err
    assert cli("config", "get", "seed", "--profile", "none").out == "\n"
    refused = cli("config", "set", "--profile", "fast", "profile", "fast")
    assert (refused.code, "cannot choose another one" in refused.err) == (2, True)


def test_the_variable_chooses_and_an_unknown_name_lists_the_known(cli, config: Path, monkeypatch) -> None:
    config.write_text("[profiles.fast]\nmax_tokens = 2\n[profiles.slow]\nmax_tokens = 3\n")
    monkeypatch.setenv("MINICPM_PROFILE", "slow")
    assert cli("run", "one two three").out == "You said: one\n"
    done = cli("run", "--profile", "fsat", "hi")
    assert (done.code, done.opened) == (2, False)
    assert "flag --profile: unknown profile 'fsat'. Did you mean 'fast'? Known: fast, slow" in done.err


def test_what_is_stronger_is_said(cli, config: Path, monkeypatch) -> None:
    monkeypatch.setenv("MINICPM_TOP_P", "0.1")
    assert "is changed, but MINICPM_TOP_P is stronger: top_p is 0.1" in cli("config", "set", "top_p", "0.5").err
    assert "is changed, but MINICPM_TOP_P is stronger" in cli("config", "unset", "top_p").err


def test_unset_takes_away_also_what_no_version_knows(cli, config: Path) -> None:
    config.write_text("xyzzy = 1\nctx = 5\n")
    assert "xyzzy is no setting of this version" in cli("run", "hi").err
    assert cli("config", "unset", "xyzzy").code == 0
    assert "ctx is not set now (default)" in cli("config", "unset", "ctx").err
    assert config.read_text() == ""
    again = cli("config", "unset", "ctx")
    assert (again.code, "ctx is not set in" in again.err) == (2, True)


def test_a_file_that_is_wrong_can_be_mended(cli, config: Path) -> None:
    config.write_text('ctx = "many"\ntop_k = "few"\n')
    assert cli("run", "hi").code == 2
    assert cli("config", "path").out == f"{config}\n"
    done = cli("config", "set", "ctx", "4096")
    assert done.code == 0
    assert f"what is still wrong: config file {config}: top_k is 'few'" in done.err
    assert cli("config", "unset", "top_k").code == 0
    assert config.read_text() == "ctx = 4096\n"


def test_a_file_that_does_not_exist_yet(cli, home: Path, monkeypatch) -> None:
    monkeypatch.setenv("MINICPM_CONFIG", str(home / "new" / "config.toml"))
    assert cli("config", "path").code == 0
    assert cli("config", "set", "seed", "1").code == 0
    assert (home / "new" / "config.toml").stat().st_mode & 0o777 == 0o600


def test_paths_are_kept_whole(cli, home: Path, config: Path, monkeypatch) -> None:
    (home / "t.jinja").touch()
    monkeypatch.chdir(home)
    assert cli("config", "set", "chat_template", "t.jinja").code == 0
    assert cli("config", "set", "data_dir", "~/d").code == 0
    assert cli("config", "set", "model", "openbmb/MiniCPM4-0.5B").code == 0
    lines = config.read_text().splitlines()
    assert lines == [
        f'chat_template = "{home / "t.jinja"}"',
        f'data_dir = "{Path("~/d").expanduser()}"',
        'model = "openbmb/MiniCPM4-0.5B"',
    ]
