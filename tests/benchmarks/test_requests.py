"""What is asked."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.load.lengths import Fixed, Uniform
from benchmarks.load.requests import LoadRequest, RandomTokens, RandomWords, read_requests
from cluster.errors import ConfigError


def test_random_tokens_are_seeded_and_share_no_prefix() -> None:
    source = RandomTokens(Uniform(5, 9), Uniform(1, 4), 1000)
    requests = list(islice(source.requests(7), 50))
    assert requests == list(islice(source.requests(7), 50))
    assert requests != list(islice(source.requests(8), 50))
    assert list(islice(source.requests(-1), 50)) != list(islice(source.requests(1), 50))
    assert len({request.prompt[:3] for request in requests}) == 50
    assert all(isinstance(token, int) and 256 <= token < 1000 for request in requests for token in request.prompt)
    assert {len(request.prompt) for request in requests} == {5, 6, 7, 8, 9}
    assert {request.max_tokens for request in requests} == {1, 2, 3, 4}


def test_random_words() -> None:
    first, second = islice(RandomWords(Fixed(12), Fixed(3)).requests(1), 2)
    assert isinstance(first.prompt, str)
    assert len(first.prompt.split()) == 12
    assert first.prompt != second.prompt


def test_a_file_is_read_in_order_and_over_again(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt": "why", "max_tokens": 3, "more": 1}\n\n{"prompt": [1, 2], "max_tokens": 5}\n')
    why, ids = LoadRequest("why", 3), LoadRequest((1, 2), 5)
    assert list(islice(read_requests(file).requests(0), 3)) == [why, ids, why]
    assert list(islice(read_requests(file).warm_up(0), 3)) == [ids, why, ids]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"prompt": "why"}',
        '{"prompt": "", "max_tokens": 1}',
        '{"prompt": "a", "max_tokens": 0}',
        '{"prompt": [1, "a"], "max_tokens": 1}',
        '{"prompt": [], "max_tokens": 1}',
        '{"prompt": [true], "max_tokens": 1}',
        '{"prompt": [-1], "max_tokens": 1}',
    ],
)
def test_a_wrong_line_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(json.dumps({"prompt": "why", "max_tokens": 3}) + "\n" + line)
    with pytest.raises(ConfigError, match=r"requests.jsonl:2: "):
        read_requests(file)


@pytest.mark.parametrize("content", [None, b"\n", b"\xff\xfe"])
def test_a_file_without_requests_is_refused(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError):
        read_requests(file)
