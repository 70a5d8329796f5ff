from __future__ import annotations

from pathlib import Path

import pytest

from cluster.cache import cache_folder


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", "/chosen")
    assert cache_folder() == Path("/chosen")
    monkeypatch.delenv("BATON_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/baton")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache/baton"
