from __future__ import annotations

import pytest
from hypothesis import settings

from router.gateway.tokenizer import Tokenizer
from tests.router.gateway.fakes import FakeCluster
from tests.router.gateway.tokenizers_in_code import byte_level, write_folder

settings.register_profile("shared-machine", deadline=None)  # an example's time says nothing where others use the cores
settings.load_profile("shared-machine")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("tokenizer"), byte_level()))


@pytest.fixture(params=(True, False), ids=("overlap", "in turns"))
def overlaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the KV travels while its prompt is being computed, in clusters that are made from now on."""
    monkeypatch.setattr(FakeCluster, "overlaps", request.param)
    value: bool = request.param
    return value
