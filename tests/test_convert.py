"""Requests and outputs survive the trip through protobuf exactly."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import convert
from cluster.pb import worker_pb2 as pb
from cluster.types import FinishReason, OrderKey, Request, SamplingParams, TokenOutput

TOKENS = st.integers(0, 2**32 - 1)
FLOATS = st.floats(allow_nan=False)
PAIRS = st.lists(st.tuples(TOKENS, FLOATS), max_size=5).map(tuple)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)

SAMPLING = st.builds(
    SamplingParams,
    max_tokens=TOKENS,
    seed=st.integers(0, 2**64 - 1),
    min_tokens=TOKENS,
    temperature=FLOATS,
    top_p=FLOATS,
    top_k=TOKENS,
    min_p=FLOATS,
    presence_penalty=FLOATS,
    frequency_penalty=FLOATS,
    repetition_penalty=FLOATS,
    logit_bias=PAIRS,
    stop_token_ids=st.lists(TOKENS, max_size=5).map(tuple),
    ignore_eos=st.booleans(),
    num_logprobs=st.none() | st.integers(0, 20),
)
REQUESTS = st.builds(
    Request,
    request_id=TEXT,
    attempt=TOKENS,
    prompt_token_ids=st.lists(TOKENS, max_size=50).map(tuple),
    sampling=SAMPLING,
    order_key=st.builds(OrderKey, virtual_deadline_s=FLOATS, arrival=st.integers(0, 2**64 - 1)),
    cache_salt=TEXT,
)
OUTPUTS = st.builds(TokenOutput, token_id=TOKENS, logprob=st.none() | FLOATS, top_logprobs=PAIRS)


@given(REQUESTS)
def test_request(request: Request) -> None:
    data = convert.request_to_pb(request).SerializeToString()
    arrived = convert.request_from_pb(pb.Request.FromString(data))
    assert arrived == request
    assert repr(arrived) == repr(request)  # tells -0.0 from 0.0, and a list from a tuple


@given(OUTPUTS)
def test_output(output: TokenOutput) -> None:
    data = convert.output_to_pb(output).SerializeToString()
    assert repr(convert.output_from_pb(pb.TokenOutput.FromString(data))) == repr(output)


def test_every_field_crosses() -> None:
    """A field that is added to the dataclasses but not to the conversion is found here."""
    for cls, message in (
        (Request, pb.Request),
        (SamplingParams, pb.SamplingParams),
        (TokenOutput, pb.TokenOutput),
        (OrderKey, pb.OrderKey),
    ):
        assert [field.name for field in dataclasses.fields(cls)] == [field.name for field in message.DESCRIPTOR.fields]


def test_defaults_are_not_absence() -> None:
    zero = SamplingParams(max_tokens=1, seed=0, temperature=0.0, top_p=0.0, repetition_penalty=0.0, num_logprobs=0)
    none = dataclasses.replace(zero, num_logprobs=None)
    for sampling in (zero, none):
        assert convert.sampling_from_pb(convert.sampling_to_pb(sampling)) == sampling
    assert convert.output_from_pb(convert.output_to_pb(TokenOutput(0, 0.0))).logprob == 0.0
    assert convert.output_from_pb(convert.output_to_pb(TokenOutput(0))).logprob is None


@pytest.mark.parametrize("value", [1 / 3, 0.1 + 0.2, -1e-310, 5e-324, 1.7976931348623157e308, math.inf, -math.inf])
def test_floats_keep_their_last_bit(value: float) -> None:
    output = TokenOutput(1, value, ((2, value),))
    assert convert.output_from_pb(convert.output_to_pb(output)) == output


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_finish_reason(reason: FinishReason | None) -> None:
    assert convert.finish_reason_from_pb(convert.finish_reason_to_pb(reason)) is reason


def test_out_of_range_is_an_error_not_another_value() -> None:
    for wrong in (SamplingParams(max_tokens=-1, seed=0), SamplingParams(max_tokens=1, seed=-1)):
        with pytest.raises(ValueError, match=r"[Oo]ut of range"):
            convert.sampling_to_pb(wrong)
