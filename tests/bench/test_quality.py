"""Perplexity against transformers' Llama by the textbook's sliding windows; KL and agreement against plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from checkpoints import write_checkpoint
from minicpm_cli.bench import quality
from minicpm_cli.bench.quality import Reader, Remembered, Window, compare, logits_of, perplexity, windows
from minicpm_cli.errors import MinicpmError, UsageError
from minicpm_cli.llm.checkpoint import Checkpoint
from minicpm_cli.model.decoder import Decoder
from minicpm_cli.model.loader import load_model
from steps import relative_error

TOKENS = 301
IDS = torch.randint(3, 250, (TOKENS,), generator=torch.Generator().manual_seed(5)).tolist()


def opened(folder: Path) -> Decoder:
    return load_model(folder, Checkpoint.read(folder).cfg, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A Llama, and one whose weights are the same but for some noise."""
    root = tmp_path_factory.mktemp("llamas")
    found = [write_checkpoint(root / str(seed), "minicpm5-1b", seed=seed, dtype=torch.float32) for seed in (0, 1)]
    plain, noise = (load_file(folder / "model.safetensors") for folder in found)
    mixed = {name: plain[name] + 0.2 * noise[name] for name in plain}
    save_file(mixed, found[1] / "model.safetensors", metadata={"format": "pt"})
    return found


@pytest.fixture(scope="module")
def decoders(folders: list[Path]) -> list[Decoder]:
    return [opened(folder) for folder in folders]


@pytest.fixture(scope="module")
def llama(folders: list[Path]) -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM.from_pretrained(folders[0], dtype=torch.float32).eval()


@torch.inference_mode()
def textbook(model: transformers.LlamaForCausalLM, size: int, stride: int) -> tuple[float, int]:
    """Labels of what an earlier window has predicted are masked; the model's own loss is the mean over the rest."""
    nll, count, done = 0.0, 0, 0
    for begin in range(0, TOKENS, stride):
        end = min(begin + size, TOKENS)
        ids = torch.tensor([IDS[begin:end]])
        labels = ids.clone()
        labels[:, : done - begin] = -100
        scored = int((labels[:, 1:] != -100).sum())
        if scored:
            nll += float(model(ids, labels=labels).loss) * scored
        count += scored
        done = end
        if end == TOKENS:
            break
    return float(torch.tensor(nll / count).exp()), count


@pytest.mark.parametrize(("size", "stride"), [(64, 64), (64, 32), (64, 7), (50, 5), (400, 100), (100, 100)])
def test_perplexity_is_the_textbooks(
    decoders: list[Decoder], llama: transformers.LlamaForCausalLM, size: int, stride: int
) -> None:
    expected, count = textbook(llama, size, stride)
    found = perplexity(Reader(decoders[0]), windows(IDS, size, stride))
    assert found.tokens == count
    assert found.value == pytest.approx(expected, rel=1e-5)


def test_windows_predict_each_token_once_with_enough_before_it() -> None:
    ids = list(range(100, 190))
    found = windows(ids, 20, 6)
    assert [token for window in found for token in window.predicted] == ids[1:]
    assert all(len(window.ids) <= 20 for window in found)
    assert all(window.first >= 14 for window in found[1:])
    for window in found:
        begin = ids.index(window.ids[0])
        assert list(window.ids) == ids[begin : begin + len(window.ids)]


def test_windows_with_bos_predict_every_token() -> None:
    for stride in (5, 19):
        found = windows(list(range(100, 190)), 20, stride, bos=1)
        assert [token for window in found for token in window.predicted] == list(range(100, 190))
        assert {window.ids[0] for window in found} == {1}
        assert max(len(window.ids) for window in found) == 20


def test_a_last_window_of_one_lonely_token_is_left_out() -> None:
    assert [len(window.predicted) for window in windows(list(range(9)), 4, 4)] == [3, 3]


@pytest.mark.parametrize(("size", "stride", "bos"), [(8, 0, None), (8, 9, None), (8, 8, 1), (1, 1, None), (1, 1, 1)])
def test_windows_that_cannot_work(size: int, stride: int, bos: int | None) -> None:
    with pytest.raises(UsageError, match=f"a stride of {stride} does not fit windows of {size}"):
        windows(range(30), size, stride, bos)


def test_too_short_a_text_says_what_is_needed() -> None:
    with pytest.raises(UsageError, match="too short: 1 tokens, and at least 2 are needed"):
        windows([7], 8, 8)
    with pytest.raises(UsageError, match="too short: 0 tokens, and at least 1 are needed"):
        windows([], 8, 4, bos=1)
    assert windows([7], 8, 4, bos=1) == [Window((1, 7), 1)]


def reference(ours: Tensor, theirs: Tensor, targets: Tensor) -> tuple[float, float, float, float]:
    """By torch's own losses, in float64."""
    ours, theirs = ours.double(), theirs.double()
    kl = functional.kl_div(ours.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="batchmean")
    losses = functional.cross_entropy(ours, targets), functional.cross_entropy(theirs, targets)
    same = (ours.topk(1).indices == theirs.topk(1).indices).double().mean()
    return float(losses[0].exp()), float(losses[1].exp()), float(kl), float(same)


@pytest.fixture(params=[1 << 26, 4 * 1024 * 7], ids=["whole windows", "a few rows at a time"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "LOGIT_BYTES", request.param)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("remembered", [False, True])
def test_a_comparison_is_plain_torchs(decoders: list[Decoder], remembered: bool) -> None:
    ours, theirs = decoders
    parts = [Window(tuple(IDS[:90])), Window(tuple(IDS[90:150]), 20)]
    other = Remembered.of(theirs, parts) if remembered else Reader(theirs)
    found = compare(Reader(ours), other, parts)
    rows = [[logits_of(d, w.ids)[w.first - 1 : -1] for w in parts] for d in (ours, theirs)]
    expected = reference(*map(torch.cat, rows), torch.tensor([t for w in parts for t in w.predicted]))
    assert (found.ppl, found.ref_ppl, found.kl, found.top1) == pytest.approx(expected, rel=1e-5)
    assert found.tokens == 89 + 40
    assert 0 < found.top1 < 1
    assert found.kl > 0.01


def test_kl_is_of_the_reference_to_the_model(decoders: list[Decoder]) -> None:
    parts = windows(IDS, 128, 128)
    forth, back = (compare(Reader(a), Reader(b), parts) for a, b in (decoders, decoders[::-1]))
    assert forth.kl != pytest.approx(back.kl, rel=1e-3)
    assert (forth.ppl, forth.ref_ppl) == (back.ref_ppl, back.ppl)


def test_a_model_agrees_with_itself(decoders: list[Decoder]) -> None:
    parts = windows(IDS, 128, 64)
    found = compare(Reader(decoders[0]), Remembered.of(decoders[0], parts), parts)
    assert (found.kl, found.top1) == (0.0, 1.0)
    assert found.ppl == found.ref_ppl == perplexity(Reader(decoders[0]), parts).value


def test_logits_of_many_steps_are_those_of_one(decoders: list[Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = logits_of(decoders[0], IDS)
    monkeypatch.setattr(quality, "STEP", 37)
    assert relative_error(logits_of(decoders[0], IDS), whole) < 1e-5


def test_a_window_leaves_nothing_for_the_next(decoders: list[Decoder]) -> None:
    reader, short = Reader(decoders[0]), Window(tuple(IDS[50:61]))
    fresh = reader.states(short)
    reader.states(Window(tuple(IDS)))
    assert torch.equal(reader.states(short), fresh)


def test_a_remembered_model_keeps_no_block(decoders: list[Decoder]) -> None:
    kept = Remembered.of(decoders[0], [Window((5, 6, 7))])
    assert kept.head.blocks == ()
    assert len(decoders[0].blocks) > 0


class Scripted:
    """A predictor whose logits are given; `asked` are the rows of each call."""

    def __init__(self, logits: Tensor) -> None:
        self.given, self.vocab = logits, logits.shape[-1]
        self.asked: list[int] = []

    def states(self, window: Window) -> Tensor:
        return self.given

    def logits(self, states: Tensor) -> Tensor:
        self.asked.append(len(states))
        return states


def test_logits_come_in_chunks_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert quality.LOGIT_BYTES == 64 * 2**20
    monkeypatch.setattr(quality, "LOGIT_BYTES", 4 * 10 * 3 + 1)
    model = Scripted(torch.zeros(8, 10))
    assert perplexity(model, [Window(tuple(range(9)))]).tokens == 8
    assert model.asked == [3, 3, 2]


def test_other_vocabularies_are_refused() -> None:
    with pytest.raises(UsageError, match="8 tokens in its vocabulary, the reference 9"):
        compare(Scripted(torch.zeros(1, 8)), Scripted(torch.zeros(1, 9)), [Window((1, 2))])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_are_an_error(bad: float) -> None:
    logits = torch.zeros(2, 8)
    logits[1, 3] = bad
    with pytest.raises(MinicpmError, match="not finite"):
        perplexity(Scripted(logits), [Window((1, 2, 3))])


def test_a_uniform_prediction_has_the_vocabularys_perplexity() -> None:
    assert perplexity(Scripted(torch.zeros(3, 8)), [Window((1, 2, 3, 4))]).value == pytest.approx(8)


def test_a_hopeless_prediction_is_still_a_number() -> None:
    logits = torch.zeros(1, 8)
    logits[0, 2] = -1e6
    assert perplexity(Scripted(logits), [Window((1, 2))]).value > 1e300


def test_progress_counts_windows(decoders: list[Decoder]) -> None:
    heard: list[tuple[int, int]] = []
    perplexity(Reader(decoders[0]), windows(IDS[:24], 8, 8), lambda done, total: heard.append((done, total)))
    assert heard == [(0, 3), (1, 3), (2, 3), (3, 3)]
