"""Every key of the configuration: defaults, typos, impossible values, and what does not fit together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from cluster.config import BatonConfig, load_config, parse_bytes
from cluster.errors import ConfigError


def nested(key: str, value: Any) -> dict[str, Any]:
    """`a.b` → `{"model": …, "a": {"b": value}}`."""
    args: dict[str, Any] = {"model": "demo"}
    *sections, last = key.split(".")
    inner = args
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[last] = value
    return args


def all_keys(section: type[BaseModel] = BatonConfig, prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        if isinstance(field.default, BaseModel):
            yield from all_keys(type(field.default), f"{prefix}{name}.")
        else:
            yield prefix + name


KEYS = sorted(all_keys())
SECTIONS = ("prefill", "decode", "gateway", "router", "kv_transfer", "fault_injection")


def error_of(args: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(args)
    return caught.value


def assert_names(error: ConfigError, key: str) -> None:
    assert error.param is not None
    assert error.param == key or error.param.startswith(key + ".")
    assert f"{key}" in error.message


def test_defaults() -> None:
    config = load_config({"model": "demo"})
    assert config.mode == "disaggregated"
    assert config.host == "127.0.0.1"
    assert config.kv_transfer.planes == ("shared_memory", "grpc")
    assert [c.name for c in config.router.classes] == ["high", "normal", "low"]
    for pool in (config.prefill, config.decode):
        assert (pool.scheme, pool.kv_dtype, pool.block_size, pool.threads) == ("int8", "bf16", 32, 1)


def test_defaults_are_valid_values() -> None:
    """What a dump writes can be read back."""
    config = load_config({"model": "demo"})
    assert load_config(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))) == config


def test_frozen() -> None:
    with pytest.raises(ValidationError):
        load_config({"model": "demo"}).model = "other"  # type: ignore[misc]


def test_model_is_required() -> None:
    error = error_of({})
    assert error.param == "model"
    assert error.message == "model: is required"


@pytest.mark.parametrize("key", KEYS)
def test_a_typo_names_the_key(key: str) -> None:
    error = error_of(nested(key + "x", 1))
    assert error.param == key + "x"
    assert f"{key}x: no such key" in error.message


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", [{"nested": 1}, [object()], -1.5, float("nan"), "✗ impossible"], ids=repr)
def test_an_impossible_value_names_the_key(key: str, value: Any) -> None:
    if isinstance(value, str) and key in ("model", "served_model_name", "host", "cluster_secret"):
        return
    if isinstance(value, dict) and key.endswith(".resources"):
        return
    assert_names(error_of(nested(key, value)), key)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("prefill.threads", 0),
        ("prefill.threads", 257),
        ("decode.block_size", 24),
        ("decode.block_size", 4),
        ("decode.block_size", 512),
        ("decode.kv_cache_bytes", 0),
        ("decode.kv_cache_bytes", "0"),
        ("decode.kv_cache_bytes", "512MB"),
        ("decode.kv_cache_bytes", "-1GiB"),
        ("decode.kv_cache_bytes", "0.1B"),
        ("decode.kv_cache_bytes", ""),
        ("decode.swap_bytes", "1e9"),
        ("decode.max_num_seqs", 0),
        ("decode.max_num_seqs", 513),
        ("decode.max_num_batched_tokens", 7),
        ("decode.reserve_fraction", 1.0),
        ("decode.reserve_fraction", -0.1),
        ("decode.replicas", 0),
        ("decode.scheme", "int3"),
        ("decode.resources", {"CPU": 1}),
        ("decode.resources", {"node": 0}),
        ("decode.resources", {"node": 1.5}),
        ("prefill.kernels", "cuda"),
        ("prefill.drain_timeout_s", 0),
        ("prefill.stall_timeout_s", float("inf")),
        ("gateway.max_attempts", 0),
        ("gateway.max_attempts", 11),
        ("gateway.request_timeout_s", 0),
        ("gateway.default_max_tokens", 0),
        ("router.max_queued_requests", 0),
        ("router.max_prefill_ahead", 0.5),
        ("router.report_timeout_s", 0.5),  # workers report as often
        ("router.gateway_timeout_s", 2),  # and gateways
        ("router.classes", []),
        ("router.classes", [{"name": "High", "up_to": 1, "slack_s": 0}]),
        ("router.classes", [{"name": "a", "up_to": 1, "slack_s": -1}]),
        ("router.classes", [{"name": "a", "up_to": 1}]),
        ("router.classes", [{"name": "a", "up_to": 1, "slack_s": 1}, {"name": "b", "up_to": 1, "slack_s": 1}]),
        ("router.classes", [{"name": "a", "up_to": 1, "slack_s": 1}, {"name": "a", "up_to": 2, "slack_s": 1}]),
        ("kv_transfer.planes", []),
        ("kv_transfer.planes", ["infiniband"]),
        ("kv_transfer.planes", "grpc"),
        ("kv_transfer.planes", ["grpc", "grpc"]),
        ("kv_transfer.lease_s", 5.0),
        ("kv_transfer.lease_s", 301.0),
        ("kv_transfer.renew_interval_s", 30.0),
        ("mode", "hybrid"),
        ("max_model_len", 15),
        ("log_level", "info"),
        ("cluster_secret", ""),
        ("model", None),
        ("prefill.scheme", "float32"),
        ("decode.kv_dtype", "float32"),
        ("kv_transfer.staging_bytes", 0),
    ],
)
def test_bounds_name_the_key(key: str, value: Any) -> None:
    error = error_of(nested(key, value))
    if key == "kv_transfer.renew_interval_s":
        key = "kv_transfer.lease_s"  # the pair is at fault
    if key == "prefill.scheme":
        key = "prefill.kv_dtype"
    assert_names(error, key)


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("value", [None, 5, "text", []])
def test_a_section_that_is_none(section: str, value: Any) -> None:
    assert_names(error_of({"model": "demo", section: value}), section)


@pytest.mark.parametrize("args", [None, [], "text", 5])
def test_a_file_that_is_no_mapping(args: Any) -> None:
    assert error_of(args).message


def test_all_faults_are_told_at_once() -> None:
    error = error_of({"model": "demo", "prefill": {"threads": 0, "treads": 1}, "modee": "x"})
    assert error.param == "prefill.threads"
    for key in ("prefill.threads", "prefill.treads", "modee"):
        assert f"{key}: " in error.message


def test_a_wrong_member_is_told_once() -> None:
    error = error_of(nested("kv_transfer.planes", ["rdma"]))
    assert error.param == "kv_transfer.planes.0"
    assert len(error.message.splitlines()) == 1


def test_pools_must_fit_only_when_there_are_two() -> None:
    pools = {"prefill": {"kv_dtype": "int8"}, "decode": {"kv_dtype": "bf16"}}
    error = error_of({"model": "demo"} | pools)
    assert error.param == "decode.kv_dtype"
    assert "KV that the prefill pool stores as int8 cannot become bf16" in error.message
    assert load_config({"model": "demo", "mode": "colocated"} | pools).decode.kv_dtype == "bf16"


FLOAT32 = {"scheme": "float32", "kv_dtype": "float32"}


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"block_size": 64}, {"block_size": 8}),
        ({"block_size": 8}, {"block_size": 256}),
        ({"kernels": "torch"}, {"kernels": "native"}),
        ({"kernels": "native"}, {"kernels": "reference"}),
        ({}, {"kv_dtype": "int8"}),
        ({"kernels": "torch"}, {"kv_dtype": "int8"}),
        (FLOAT32, {}),
        (FLOAT32, {"kv_dtype": "int8"}),
    ],
)
def test_pools_whose_kv_is_repacked_may_differ(prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    load_config({"model": "demo", "prefill": prefill, "decode": decode})


def test_pools_may_differ_in_scheme() -> None:
    config = load_config({"model": "demo", "prefill": {"scheme": "bf16"}, "decode": {"scheme": "int8"}})
    assert config.prefill.scheme != config.decode.scheme


def test_float32_is_for_everything() -> None:
    float32 = {"scheme": "float32", "kv_dtype": "float32"}
    assert load_config({"model": "demo", "prefill": float32, "decode": float32}).decode.kv_dtype == "float32"
    assert_names(error_of({"model": "demo", "prefill": {"scheme": "float32"}}), "prefill.kv_dtype")
    assert_names(error_of({"model": "demo", "decode": float32}), "decode.kv_dtype")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("17", 17), ("17B", 17), ("1KiB", 1024), ("1.5GiB", 3 * 2**29), (" 2 TiB ", 2**41), (5, 5), (None, None)],
)
def test_byte_sizes(text: Any, expected: Any) -> None:
    assert parse_bytes(text) == expected


@given(st.integers(1, 1023), st.sampled_from([("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)]))
def test_byte_sizes_are_exact(number: int, unit: tuple[str, int]) -> None:
    assert parse_bytes(f"{number}{unit[0]}") == number << unit[1]


@given(st.integers(0, 2**62))
def test_plain_numbers_of_bytes_are_exact(number: int) -> None:
    assert parse_bytes(str(number)) == number
