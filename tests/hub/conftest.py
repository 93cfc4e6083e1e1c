from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, serve
from tiny_repo import REPO, checkpoint


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The fake hub, which huggingface_hub takes for the real one; its cache is tmp_path/hub."""
    import huggingface_hub
    from huggingface_hub import constants

    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # its waits between attempts
    with serve(FakeHub(REPO, checkpoint())) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield running
        huggingface_hub.close_session()
