"""What a request adds to the scores of tokens, beside others and however far the host lags."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_cases import GREEDY, SAMPLED, answers, expected, prompt, request, run_checked
from fake_decoder import reference
from lagged_cases import WAYS, Draws, lagged_engine
from tensor_decoder import TensorDecoder

from minicpm_cli.engine.engine import Engine, EngineConfig

BIASES = ((3, -100.0), (5, 1.5), (17, 0.75))


def likeliest(start: tuple[int, ...], count: int) -> list[int]:
    history = list(start)
    for _ in range(count):
        scores = reference(history).clone()
        for token, bias in BIASES:
            scores[token] += bias
        history.append(int(scores.argmax()))
    return history[len(start) :]


@pytest.mark.parametrize("way", WAYS)
def test_they_are_added_to_the_scores(way: str) -> None:
    engine, _ = lagged_engine(way)
    biased = [request(f"b{i}", prompt(5 + i, i), replace(GREEDY, logit_bias=BIASES)) for i in range(3)]
    others = [request("a", prompt(6), GREEDY), request("c", prompt(7), SAMPLED)]
    found = answers(run_checked(engine, [others[0], *biased, others[1]]))
    assert found == {
        **{r.id: expected(r) for r in others},
        **{r.id: likeliest(r.prompt, len(found[r.id])) for r in biased},
    }
    assert any(found[r.id] != expected(r) for r in biased)


def test_the_largest_one_leaves_no_other_token_and_the_least_one_takes_its_token_away() -> None:
    engine, _ = lagged_engine("lagged")
    only = request("only", prompt(6), replace(SAMPLED, logit_bias=((7, 100.0),)))
    never = request("never", prompt(6), replace(SAMPLED, temperature=100.0, logit_bias=((7, -100.0),)))
    found = answers(run_checked(engine, [only, never]))
    assert set(found["only"]) == {7}
    assert 7 not in found["never"] or len(set(found["never"])) > 1


def test_log_probabilities_are_those_of_the_model_without_them() -> None:
    engine, _ = lagged_engine("lagged")
    params = replace(GREEDY, max_tokens=1, logprobs=0, logit_bias=((7, 100.0),))
    (event,) = (e for e in run_checked(engine, [request("a", prompt(6), params)]) if e.token is not None)
    assert event.token == 7
    assert event.logprob is not None
    assert event.logprob.logprob == pytest.approx(float(reference(list(prompt(6))).log_softmax(-1)[7]), abs=1e-5)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_on_a_device_beside_others(device: str, graphs: bool) -> None:
    config = EngineConfig(pages=90, page_size=4, lag=True, max_seqs=4, max_batch_tokens=64, context=80, graphs=graphs)
    engine = Engine(TensorDecoder(90, 4, device), None, config, draw=Draws() if device == "cpu" else None)
    others = [request(f"o{i}", prompt(6, i), (GREEDY, SAMPLED)[i % 2], seed=i) for i in range(2)]
    alone = answers(run_checked(engine, others))
    only = request("only", prompt(6, 3), replace(SAMPLED, logit_bias=((7, 100.0),)))
    never = request("o0", others[0].prompt, replace(GREEDY, logit_bias=((alone["o0"][0], -100.0),)))
    found = answers(run_checked(engine, [*others, only]))
    assert set(found.pop("only")) == {7}
    assert found == alone
    assert answers(run_checked(engine, [never]))["o0"][0] != alone["o0"][0]
