"""Profiles, and config files that another version or another program wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minicpm_cli.errors import UsageError
from minicpm_cli.settings import Layer, Settings

TEXT = """
ctx = 1000
max-seqs = 2
top_k = 5

[profiles.fast]
temperature = 0.1
max_seqs = 3
top_k = 6

[profiles.careful]
temperature = 0.9
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text(TEXT)
    return tmp_path / "config.toml"


def load(config: Path, flags: dict[str, Any] | None = None, *layers: Layer, **environ: str) -> Settings:
    return Settings.load(flags, environ, config, layers)


def test_a_profile_is_stronger_than_the_file_and_weaker_than_the_rest(config: Path) -> None:
    settings = load(
        config,
        {"profile": "fast", "top_p": 0.5},
        Layer("session s", {"min_p": 0.2, "seed": 2}),
        Layer("template t", {"min_p": 0.1, "top_p": 0.4}),
        MINICPM_TOP_K="7",
        MINICPM_SEED="1",
    )
    assert settings.options.ctx == 1000
    assert settings.options.max_seqs == 3
    assert settings.sampling == {"temperature": 0.1, "top_k": 7, "min_p": 0.1, "top_p": 0.5, "seed": 2}
    assert settings.origin("max_seqs") == f"profile fast in {config}"
    assert settings.origin("ctx") == f"config file {config}"
    assert settings.origin("top_k") == "MINICPM_TOP_K"
    assert settings.origin("seed") == "session s"
    assert settings.origin("min_p") == "template t"
    assert settings.origin("top_p") == "flag --top-p"


@pytest.mark.parametrize(
    ("flag", "variable", "line", "chosen"),
    [
        ("careful", "fast", "fast", "careful"),
        (None, "careful", "fast", "careful"),
        (None, "", "careful", "careful"),
        ("none", "fast", "fast", None),
        (None, "none", "fast", None),
        (None, "", None, None),
    ],
)
def test_who_chooses_the_profile(
    config: Path, flag: str | None, variable: str, line: str | None, chosen: str | None
) -> None:
    if line:
        config.write_text(f'profile = "{line}"\n{TEXT}')
    settings = load(config, {"profile": flag}, MINICPM_PROFILE=variable)
    assert settings.sampling.get("temperature") == {"fast": 0.1, "careful": 0.9, None: None}[chosen]
    assert next(row.value for row in settings.rows if row.name == "profile") == chosen
    assert settings.profiles == ("fast", "careful")


def test_an_unknown_profile_lists_those_that_are_known(config: Path) -> None:
    with pytest.raises(UsageError, match=r"flag --profile: unknown profile 'fsat'\. Did you mean 'fast'\? Known: "):
        load(config, {"profile": "fsat"})
    with pytest.raises(UsageError, match=r"MINICPM_PROFILE: unknown profile 'x'\. Known: fast, careful in "):
        load(config, MINICPM_PROFILE="x")
    config.write_text("")
    with pytest.raises(UsageError, match=r"There is none yet in .*minicpm config set --profile x "):
        load(config, {"profile": "x"})


def test_values_of_a_profile_are_checked_with_file_profile_and_key(config: Path) -> None:
    config.write_text('[profiles.fast]\ntemperature = "hot"\n')
    with pytest.raises(UsageError, match=rf"profile fast in {config}: temperature is 'hot'; it must be a number"):
        load(config, {"profile": "fast"})
    config.write_text("[profiles.fast]\ntemprature = 1\n")
    with pytest.raises(UsageError, match=rf"profile fast in {config}: unknown setting 'temprature'.*'temperature'"):
        load(config, {"profile": "fast"})
    config.write_text('[profiles.fast]\nprofile = "other"\n')
    with pytest.raises(UsageError, match="cannot choose another one"):
        load(config, {"profile": "fast"})


@pytest.mark.parametrize("text", ["profiles = 1", "[profiles]\nfast = 1", "[[profiles]]\nfast = 1"])
def test_profiles_that_are_no_tables(config: Path, text: str) -> None:
    config.write_text(text)
    with pytest.raises(UsageError, match=r"must be tables of settings, \[profiles\.NAME\] each"):
        load(config)


def test_profile_as_a_table_is_a_slip_that_is_explained(config: Path) -> None:
    config.write_text("[profile]\nctx = 1\n")
    with pytest.raises(UsageError, match=r"profile is \{'ctx': 1\}; it must be the name of a profile"):
        load(config)


def test_keys_of_other_versions_are_named_and_left_out(config: Path) -> None:
    config.write_text("xyzzy = 1\nctx = 7\n[sampling]\ntemperature = 2\n[profiles.fast]\nplugh = 3\n")
    settings = load(config, {"profile": "fast"})
    assert settings.options.ctx == 7
    assert settings.sampling == {}
    said = [note.partition(" is no setting of this version and is ignored")[0] for note in settings.notes]
    assert said == [
        f"config file {config}: xyzzy",
        f"config file {config}: sampling",
        f"profile fast in {config}: plugh",
    ]
    assert load(config).notes == settings.notes[:2]


def test_keys_as_other_programs_call_them_are_read_and_said(config: Path) -> None:
    config.write_text("num_ctx = 512\nmax-new-tokens = 9\n")
    settings = load(config)
    assert (settings.options.ctx, settings.sampling["max_tokens"]) == (512, 9)
    assert settings.notes[0] == f"config file {config}: num_ctx is called ctx here, and read as that; rename it"
    config.write_text("num_ctx = -1")
    with pytest.raises(UsageError, match="ctx is -1"):
        load(config)


OLDEST = """
model = "demo"\ndevice = "cpu"\ndtype = "bf16"\nctx = 512\nmax-seqs = 1\nmemory-fraction = 0.5\nquantize = "none"
head_bits = 8\nkv_dtype = "auto"\ngraphs = true\nchat_template = "auto"\nmax_batch_tokens = 64\ntemperature = 1
top_p = 1\ntop_k = 0\nmin_p = 0\nrepetition_penalty = 1\npresence_penalty = 0\nfrequency_penalty = 0\nmax_tokens = 5
stop = "x"\nseed = 1\nlogprobs = 0\nthink = false\nthink_budget = 3\nthreads = 1\ncache_dir = "~/c"\ndata_dir = "~/d"
color = true\nplain = false\nquiet = false\nverbose = false
"""  # every key of the first version


def test_a_config_file_of_the_first_version_is_read_as_it_was(config: Path) -> None:
    config.write_text(OLDEST)
    settings = load(config)
    assert settings.notes == ()
    assert {row.name for row in settings.rows if row.origin != "default"} >= {
        line.partition(" = ")[0].replace("-", "_") for line in OLDEST.strip().splitlines()
    }
