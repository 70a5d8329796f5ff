"""msgpack of frozen dataclasses: what comes off a wire is what it claims to be, or a WireError."""

from __future__ import annotations

import dataclasses

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import wire
from cluster.kv_layout import KVLayout
from cluster.kv_ticket import BlockRef, KVTicket
from cluster.types import AdmitRequest, KVPeer, OrderKey, Placement, TokenOutput, WorkerAddress, WorkerLoad, WorkerRole, WorkerState

COUNTS = st.integers(0, 2**31)
TICKETS = st.builds(
    KVTicket,
    request_id=st.text(max_size=20),
    attempt=COUNTS,
    nonce=st.binary(min_size=16, max_size=16),
    incarnation=st.text(max_size=20),
    endpoint=st.text(max_size=20),
    blocks=st.lists(st.builds(BlockRef, block_id=COUNTS, generation=COUNTS), max_size=10).map(tuple),
    num_tokens=COUNTS,
    layout=st.builds(
        KVLayout,
        num_layers=COUNTS,
        num_kv_heads=COUNTS,
        head_dim=COUNTS,
        block_size=COUNTS,
        kv_dtype=st.text(max_size=8),
        packing=st.text(max_size=8),
    ),
    checkpoint=st.text(max_size=32),
    domain=st.text(max_size=32),
    lease_s=st.floats(allow_nan=False),
    first_token=st.none()
    | st.builds(
        TokenOutput,
        token_id=COUNTS,
        logprob=st.none() | st.floats(allow_nan=False),
        top_logprobs=st.lists(st.tuples(COUNTS, st.floats(allow_nan=False)), max_size=4).map(tuple),
    ),
    checksums=st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
)
LOAD = WorkerLoad(
    worker_id="w",
    incarnation="i",
    role=WorkerRole.COLOCATED,
    state=WorkerState.DRAINING,
    endpoint="127.0.0.1:1",
    node_id="n",
    checkpoint="c",
    domain="d",
    max_model_len=8192,
    layout=KVLayout(2, 2, 16, 32, "int8", "vnni"),
    num_blocks=7,
    num_reserved_blocks=1,
    max_num_seqs=4,
    max_num_batched_tokens=512,
    live_requests=("a/0", "b/1"),
    kv_peers=(KVPeer("i", "grpc", "not shared_memory: another host"),),
)


@given(TICKETS)
def test_ticket_round_trip(ticket: KVTicket) -> None:
    assert repr(wire.decode(KVTicket, wire.encode(ticket))) == repr(ticket)


@given(TICKETS)
def test_fields_are_packed_by_name_and_in_order(ticket: KVTicket) -> None:
    assert wire.encode(ticket) == msgpack.packb(dataclasses.asdict(ticket))
    assert wire.encode(LOAD) == msgpack.packb(dataclasses.asdict(LOAD))


def test_enums_come_back_as_enums() -> None:
    load = wire.decode(WorkerLoad, wire.encode(LOAD))
    assert load == LOAD
    assert load.role is WorkerRole.COLOCATED
    assert load.state is WorkerState.DRAINING


def test_nested_and_optional_dataclasses() -> None:
    address = WorkerAddress("w", "i", "e")
    for value in (Placement("r", 3, OrderKey(1.5, 2), address), Placement("r", 3, OrderKey(1.5, 2), address, prefill=address)):
        assert wire.decode(Placement, wire.encode(value)) == value
    admit = AdmitRequest("r", "g", 3, 4, order_key=OrderKey(0.1, 9), exclude=("x",))
    assert wire.decode(AdmitRequest, wire.encode(admit)) == admit


@given(st.binary(max_size=60))
def test_random_bytes_are_a_wire_error(data: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(KVTicket, data)


@given(st.data())
def test_damaged_ticket_never_raises_anything_else(data: st.DataObject) -> None:
    encoded = bytearray(wire.encode(data.draw(TICKETS)))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    encoded = encoded[: data.draw(st.integers(0, len(encoded)))]
    try:
        ticket = wire.decode(KVTicket, bytes(encoded))
    except wire.WireError:
        return
    assert isinstance(ticket.nonce, bytes)
    assert all(isinstance(ref, BlockRef) for ref in ticket.blocks)


LAYOUT = dataclasses.asdict(KVLayout(2, 2, 16, 8, "float32"))


@pytest.mark.parametrize(
    "value",
    [
        None,
        5,
        "text",
        [],
        [LAYOUT],
        {},
        {key: value for key, value in LAYOUT.items() if key != "head_dim"},
        LAYOUT | {"head_dim": None},
        LAYOUT | {"head_dim": "many"},
        LAYOUT | {"head_dim": 1.5},
        LAYOUT | {"kv_dtype": 5},
    ],
)
def test_wrong_shape(value: object) -> None:
    with pytest.raises(wire.WireError, match="not a KVLayout"):
        wire.decode(KVLayout, msgpack.packb(value))


def test_trailing_bytes() -> None:
    with pytest.raises(wire.WireError):
        wire.decode(KVLayout, msgpack.packb(LAYOUT) + b"\0")


def test_deep_nesting() -> None:
    with pytest.raises(wire.WireError):
        wire.decode(KVLayout, b"\x91" * 100_000)
