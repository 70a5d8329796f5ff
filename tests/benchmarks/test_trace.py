"""Latencies of one request, however its tokens were chunked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load.trace import Chunk, Trace, deal_tokens

CHUNKS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 20)), min_size=1, max_size=20)


def trace_of(gaps: list[tuple[float, int]], num_tokens: int, counts: list[int] | None = None) -> Trace:
    now_s, chunks = 1.0, []
    for index, (gap_s, num_chars) in enumerate(gaps):
        now_s += gap_s
        chunks.append(Chunk(now_s, num_chars, counts[index] if counts else None))
    return Trace(0.5, 1.0, now_s, tuple(chunks), 8, num_tokens)


@given(gaps=CHUNKS, num_more=st.integers(0, 50))
def test_itls_are_one_a_token_and_sum_to_the_time_between(gaps: list[tuple[float, int]], num_more: int) -> None:
    trace = trace_of(gaps, num_tokens=len(gaps) + num_more)
    dealt = deal_tokens(trace.chunks, trace.num_output_tokens)
    assert sum(dealt) == trace.num_output_tokens
    assert len(trace.itls_s) == trace.num_output_tokens - 1
    assert min(dealt) >= 1
    assert sum(trace.itls_s) == pytest.approx(trace.chunks[-1].arrived_s - trace.chunks[0].arrived_s)
    if trace.tpot_s is not None:
        assert trace.tpot_s == pytest.approx(sum(trace.itls_s) / len(trace.itls_s), abs=1e-9)


@given(gaps=CHUNKS, data=st.data())
def test_counts_of_the_protocol_are_taken(gaps: list[tuple[float, int]], data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 5), min_size=len(gaps), max_size=len(gaps)))
    trace = trace_of(gaps, sum(counts), counts)
    assert deal_tokens(trace.chunks, trace.num_output_tokens) == counts
    assert len(trace.itls_s) == sum(counts) - 1


def test_a_chunk_of_four_is_four_itls_of_a_quarter() -> None:
    trace = trace_of([(0.3, 3), (0.4, 12)], num_tokens=5)
    assert deal_tokens(trace.chunks, 5) == [2, 3]
    assert trace_of([(0.3, 3), (0.4, 12)], 5, [1, 4]).itls_s == pytest.approx([0.1] * 4)
    assert trace_of([(0.3, 3), (0.4, 12)], 5, [2, 3]).itls_s == pytest.approx([0.0, *[0.4 / 3] * 3])


def test_chunks_of_one_read_are_one_arrival() -> None:
    trace = trace_of([(0.3, 1), (0.4, 1), (0.0, 1)], num_tokens=3)
    assert trace.gaps_s == pytest.approx([0.4, 0.0])
    assert trace.itls_s == pytest.approx([0.2, 0.2])


def test_a_chunk_without_a_token_is_no_arrival() -> None:
    trace = trace_of([(0.1, 1), (0.1, 1), (0.1, 1)], 2, [1, 0, 1])
    assert trace.itls_s == pytest.approx([0.2])


def test_latencies() -> None:
    trace = Trace(0.9, 1.0, 3.0, (Chunk(1.5, 1, None), Chunk(2.5, 1, None)), 8, 4)
    assert trace.lag_s == pytest.approx(0.1)
    assert (trace.ttft_s, trace.e2e_s, trace.gaps_s) == (0.5, 2.0, [1.0])
    assert trace.tpot_s == pytest.approx(0.5)  # (2.0 - 0.5) / 3


def test_an_answer_without_text_has_its_first_token_at_its_end() -> None:
    trace = Trace(0.0, 1.0, 3.0, (), 8, 1)
    assert (trace.ttft_s, trace.tpot_s, trace.itls_s) == (2.0, None, [])


def test_fewer_tokens_than_chunks() -> None:
    trace = trace_of([(0.1, 1), (0.1, 1), (0.1, 1)], num_tokens=2)
    assert deal_tokens(trace.chunks, 2) == [1, 1, 1]
    assert trace.itls_s == pytest.approx([0.1, 0.1])
