"""Is the head the embedding? Config and files decide together, and a contradiction is an error, never a lost head."""

from __future__ import annotations

import pytest
import torch

from checkpoints import checkpoint_config, state_dict
from minicpm_cli.errors import WeightsError
from minicpm_cli.model.config import ModelConfig
from steps import all_logits, decoder_of, relative_error

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SAYS = {"tied": True, "untied": False, "nothing": None}
FILES = ("both the same", "both and they differ", "embedding only")
IDS = [3, 1, 4, 1, 5]


def outcome(family: str, says: str, files: str) -> torch.Tensor | str:
    """The logits, or what the error says."""
    config = checkpoint_config(family, tie=SAYS[says])
    if SAYS[says] is None:
        config.pop("tie_word_embeddings", None)
    tensors = state_dict(family, dtype=torch.float32, tie=True)
    if files == "embedding only":
        del tensors[HEAD]
    elif files == "both and they differ":
        tensors[HEAD] = tensors[EMBED].flip(0).contiguous()
    else:
        tensors[HEAD] = tensors[EMBED].clone()
    try:
        return all_logits(decoder_of(ModelConfig.from_hf(config), tensors), IDS)
    except WeightsError as error:
        return str(error)


@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("says", SAYS)
@pytest.mark.parametrize(("family", "by_class"), [("minicpm-1b", True), ("minicpm5-1b", False)])
def test_config_and_files(family: str, by_class: bool, says: str, files: str) -> None:
    got, embedded = outcome(family, says, files), outcome(family, "tied", "embedding only")
    tied = by_class if SAYS[says] is None else SAYS[says]
    if files == "embedding only" and not tied:
        assert isinstance(got, str)
        assert f"{HEAD} is missing" in got
        assert ("tie_word_embeddings false" if says == "untied" else "without tie_word_embeddings") in got
    elif files == "both and they differ" and says == "tied":
        assert isinstance(got, str)
        assert "the files hold both and they differ" in got
    else:
        assert isinstance(got, torch.Tensor)
        assert isinstance(embedded, torch.Tensor)
        own = embedded.flip(1) if files == "both and they differ" else embedded  # rows in reverse: logits in reverse
        assert relative_error(got, own) < 1e-6
