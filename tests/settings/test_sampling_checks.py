"""Sampling values are refused before anything loads, by name, value and range."""

from __future__ import annotations

import math
from typing import Any

import pytest

from minicpm_cli.errors import RequestError
from minicpm_cli.types import SamplingParams, check_sampling


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -1),
        ("temperature", math.inf),
        ("temperature", 10**400),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 1.5),
        ("top_p", -0.1),
        ("top_k", -1),
        ("top_k", 1.5),
        ("min_p", 1.01),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.1),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("seed", -1),
        ("seed", 2**64),
        ("logprobs", 21),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", 5),
        ("logit_bias", {"five": 1}),
        ("logit_bias", {"5": 100.5}),
        ("logit_bias", {"5": math.nan}),
        ("logit_bias", {"5": None}),
        ("logit_bias", {5.5: 1}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {2**31: 1}),
        ("logit_bias", ["5"]),
        ("logit_bias", "5=1"),
        ("logit_bias", 5),
        ("think", "yes"),
        ("nonsense", 1),
    ],
)
def test_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        check_sampling({name: value})
    assert caught.value.exit_code == 2
    assert caught.value.code == "bad_parameter"


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0), ("top_p", 0), ("top_k", 0), ("min_p", 1), ("max_tokens", 1), ("seed", 2**64 - 1)],
)
def test_edges_are_allowed(name: str, value: Any) -> None:
    assert check_sampling({name: value}) == {name: value}


@pytest.mark.parametrize("value", [{"9": 1, "5": -100}, {9: 1.0, 5: -100}, [[9, 1], (5, -100)], ["9=1", "5=-100"]])
def test_biases(value: Any) -> None:
    found = check_sampling({"logit_bias": value})
    assert found == {"logit_bias": ((5, -100.0), (9, 1.0))}
    assert check_sampling(found) == found


def test_laid_over_the_defaults() -> None:
    params = SamplingParams(temperature=0.5).checked({"top_p": 0.8, "stop": "x", "seed": None})
    assert (params.temperature, params.top_p, params.stop, params.seed) == (0.5, 0.8, ("x",), None)
