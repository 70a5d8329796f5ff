"""What a soak says of the books in the end, as a server tells them."""

from __future__ import annotations

import pytest

from benchmarks.endurance import books
from deploy import doctor
from tests.conftest import free_port
from tests.deploy.books_of import cluster, process
from tests.deploy.books_server import answering, telling

LEAK = cluster(process("decode", held={"blocks_owned": 2}))
BUSY = cluster(process("gateway", requests=("r",)), process("router", requests=("r",)), process("decode", requests=("r",)))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CONFIRM_S", 0.01)
    monkeypatch.setattr(books, "_PATIENCE_S", 0.5)


async def test_what_goes_away_is_waited_for() -> None:
    with answering(*telling(BUSY, LEAK, cluster())) as url:
        assert await books.await_balance(url) == []


async def test_what_stays_is_told() -> None:
    with answering(*telling(LEAK)) as url:
        assert await books.await_balance(url) == ["decode host-decode holds blocks_owned 2 and no request is running"]
    with answering(*telling(BUSY)) as url:
        assert await books.await_balance(url) == ["not idle, but balanced: 1 request running"]


async def test_nobody_answers() -> None:
    [said] = await books.await_balance(f"http://127.0.0.1:{free_port()}")
    assert "does not answer" in said
