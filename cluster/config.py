"""The configuration: the `args` of the Serve application in a YAML file, checked as a whole before anything starts.

Every key has a default but `model`. A typo, a wrong type or an impossible value raises `ConfigError` naming the dotted key.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from cluster.config_section import Section, misfit
from cluster.errors import ConfigError
from cluster.faults.points import FaultAction, FaultPoint
from cluster.faults.rules import FaultInjectionConfig
from cluster.kv_layout import can_become

Scheme = Literal["bf16", "int8", "int4", "float32"]
KVDtype = Literal["bf16", "int8", "float32"]
PlaneName = Literal["shared_memory", "nccl", "nixl", "grpc"]

_RAY_OWN_RESOURCES: Final = ("CPU", "GPU", "memory", "object_store_memory")
_UNITS: Final = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_bytes(value: Any) -> Any:
    """`512MiB` → bytes; numbers pass."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]iB|B)?", value.strip())
    if match is None:
        raise ValueError("must be a number of bytes, as 1073741824 or 512MiB or 1.5GiB")
    return int(Decimal(match[1]) * _UNITS[match[2] or ""])


ByteSize = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("must be a power of two")
    return value


def _each_once(planes: tuple[PlaneName, ...]) -> tuple[PlaneName, ...]:
    if len(set(planes)) != len(planes):
        raise ValueError("must name each plane once")
    return planes


class EngineConfig(Section):
    """One worker's engine."""

    scheme: Scheme = Field("int8", description="how linears compute: bf16, int8 (W8A8), int4 (W4A8) or float32 (the oracle)")
    kv_dtype: KVDtype = Field(
        "bf16", description="how KV is stored: bf16, int8 with a scale for each token and head, or float32, which goes with scheme float32"
    )
    kernels: Literal["native", "torch", "reference"] = Field(
        "native", description="kernel set: native (Baton's C++), torch (oneDNN; stands in where the native cannot be built) or reference"
    )
    threads: Annotated[int, Field(ge=1, le=256)] = Field(1, description="torch threads of one worker")
    block_size: Annotated[int, Field(ge=8, le=256), AfterValidator(_power_of_two)] = Field(32, description="tokens in a KV block")
    kv_cache_bytes: ByteSize = Field(512 * 2**20, description="size of the KV pool")
    max_num_seqs: Annotated[int, Field(ge=1)] = Field(64, description="sequences in one step")
    max_num_batched_tokens: Annotated[int, Field(ge=8)] = Field(512, description="tokens in one step; longer prompts are chunked")
    reserve_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(0.1, description="share of the blocks kept for running sequences to grow")
    swap_bytes: ByteSize = Field(1 * 2**30, description="host memory for the KV of preempted sequences")
    prefix_caching: bool = Field(True, description="share equal prompt prefixes")


def _custom(resources: dict[str, float]) -> dict[str, float]:
    for name, amount in resources.items():
        if name in _RAY_OWN_RESOURCES:
            raise ValueError(f"{name} is Ray's own; these are custom resources")
        if amount > 1 and not amount.is_integer():
            raise ValueError(f"{name}: above 1 Ray reserves whole numbers")
    return resources


class PoolConfig(EngineConfig):
    """A pool: equal workers, one engine each."""

    replicas: Annotated[int, Field(ge=1)] = Field(1, description="workers in the pool")
    num_cpus: Annotated[float, Field(ge=0)] = Field(1.0, description="logical CPUs Ray reserves for one worker")
    resources: Annotated[dict[str, Annotated[float, Field(gt=0)]], AfterValidator(_custom)] = Field(
        {}, description="Ray custom resources reserved for one worker, as `{big_memory: 1}`: it runs only on nodes that have them"
    )
    drain_timeout_s: Annotated[float, Field(gt=0)] = Field(30.0, description="how long a stopping worker waits for its requests")
    stall_timeout_s: Annotated[float, Field(gt=0)] = Field(60.0, description="a step that takes longer makes the worker unhealthy")


class GatewayConfig(Section):
    """The edge to clients: HTTP, and gRPC where it has a port."""

    replicas: Annotated[int, Field(ge=1)] = Field(1, description="gateways; each is stateless")
    num_cpus: Annotated[float, Field(ge=0)] = Field(0.5, description="logical CPUs Ray reserves for one gateway")
    max_body_bytes: ByteSize = Field(4 * 2**20, description="larger bodies get 413, larger gRPC requests INVALID_ARGUMENT")
    grpc_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None, description="port of the gRPC API on each gateway's node; gateways of one node share it; null: no gRPC"
    )
    grpc_host: Annotated[str, Field(pattern=r"^[A-Za-z0-9.:_-]+$")] = Field(
        "127.0.0.1", description="address that gateways bind the gRPC API to"
    )
    default_max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="for requests without max_tokens; null: up to the context"
    )
    request_timeout_s: Annotated[float, Field(gt=0)] = Field(600.0, description="deadline of a request that brings none")
    max_attempts: Annotated[int, Field(ge=1, le=10)] = Field(3, description="tries in a row, without a new token, when workers fail")
    failure_policy: Literal["recompute", "fail"] = Field(
        "recompute",
        description="when a worker fails after a request's first token: recompute (prefill again, replay what is out, go on) or fail",
    )


class PriorityClass(Section):
    """A name for a range of the integer `priority`: it groups the queue's gauges and sets the slack of the order key."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")]
    up_to: int = Field(description="the class holds the priorities above the previous class's up_to, up to this one")
    slack_s: Annotated[float, Field(ge=0)] = Field(description="a request at the class's edge waits as if it had arrived this much later")


class RouterConfig(Section):
    """The queue and the placement."""

    num_cpus: Annotated[float, Field(ge=0)] = Field(0.5, description="logical CPUs Ray reserves for the router")
    max_queued_requests: Annotated[int, Field(ge=1)] = Field(256, description="more get 429")
    max_queued_tokens: Annotated[int, Field(ge=1)] = Field(1_000_000, description="prompt tokens in the queue; more get 429")
    classes: Annotated[tuple[PriorityClass, ...], Field(min_length=1)] = Field(
        (
            PriorityClass(name="high", up_to=-1, slack_s=0.0),
            PriorityClass(name="normal", up_to=0, slack_s=10.0),
            PriorityClass(name="low", up_to=2**31 - 1, slack_s=60.0),
        ),
        description="ranges of `priority`, lowest first: `name`, `up_to` (highest priority of the class), `slack_s`",
    )
    max_prefill_ahead: Annotated[float, Field(ge=1)] = Field(
        2.0, description="prompt tokens placed on a prefill worker and not yet computed, as a multiple of its step budget"
    )
    report_timeout_s: Annotated[float, Field(ge=1)] = Field(3.0, description="a worker not heard of for this long gets no new work")
    gateway_timeout_s: Annotated[float, Field(ge=3)] = Field(5.0, description="placements of a gateway not heard of for this long end")
    recovery_s: Annotated[float, Field(ge=0)] = Field(1.0, description="how long a new router waits for the workers' reports")
    capacity_wait_s: Annotated[float, Field(ge=0)] = Field(
        30.0, description="how long a request waits while no worker could ever take it, as while a pool's only worker restarts; then 503"
    )

    @model_validator(mode="after")
    def _classes_ascend(self) -> RouterConfig:
        bounds = [c.up_to for c in self.classes]
        if bounds != sorted(set(bounds)):
            raise misfit("classes", "up_to must rise from class to class")
        if len({c.name for c in self.classes}) != len(self.classes):
            raise misfit("classes", "names must differ")
        slacks = [c.slack_s for c in self.classes]
        if slacks != sorted(set(slacks)):
            raise misfit("classes", "slack_s must rise from class to class")
        return self


class TransferConfig(Section):
    """The KV handoff."""

    planes: Annotated[tuple[PlaneName, ...], Field(min_length=1), AfterValidator(_each_once)] = Field(
        ("shared_memory", "grpc"),
        description="shared_memory, nccl, nixl and grpc in order of preference; each pair uses the first that both have and that works",
    )
    overlap: bool = Field(True, description="KV travels while the rest of its prompt is computed; false: after the first token")
    lease_s: Annotated[float, Field(gt=0)] = Field(30.0, description="how long prefilled KV is kept without a renewal")
    renew_interval_s: Annotated[float, Field(gt=0)] = Field(5.0, description="how often a waiting decode worker renews")
    max_lease_s: Annotated[float, Field(gt=0)] = Field(300.0, description="the longest life of a lease, renewals included")
    staging_bytes: ByteSize = Field(
        64 * 2**20, description="a decode worker's memory for blocks that are repacked, where the pools' blocks differ"
    )
    checksums: bool = Field(False, description="CRC-32 of every block, checked on arrival")

    @model_validator(mode="after")
    def _intervals_fit(self) -> TransferConfig:
        if not self.renew_interval_s < self.lease_s <= self.max_lease_s:
            raise misfit("lease_s", "must be renew_interval_s < lease_s <= max_lease_s")
        return self


class BatonConfig(Section):
    """Everything. One model an application."""

    model: str = Field(
        description="the demo model's name, a folder with safetensors, a GGUF file, or a hub id as org/name or org/name@revision"
    )
    served_model_name: str | None = Field(None, description="the name clients use; default: the model's own")
    mode: Literal["disaggregated", "colocated"] = Field("disaggregated", description="two pools, or `decode` alone doing both")
    max_model_len: Annotated[int, Field(ge=16)] | None = Field(None, description="prompt + output tokens; default: the model's own limit")
    host: str = Field("127.0.0.1", description="address that workers bind their endpoints to")
    cluster_secret: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="shared by all internal calls; default: drawn at each start"
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="DEBUG, INFO, WARNING or ERROR")
    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig()
    gateway: GatewayConfig = GatewayConfig()
    router: RouterConfig = RouterConfig()
    kv_transfer: TransferConfig = TransferConfig()
    fault_injection: FaultInjectionConfig = FaultInjectionConfig()

    @model_validator(mode="after")
    def _faults_fit(self) -> BatonConfig:
        for index, rule in enumerate(self.fault_injection.rules):
            if (rule.action, rule.point) == (FaultAction.CORRUPT, FaultPoint.FETCH_CHUNK) and not self.kv_transfer.checksums:
                raise misfit(f"fault_injection.rules.{index}.action", "corrupt at fetch.chunk needs kv_transfer.checksums to be noticed")
            if self.mode == "colocated" and rule.point.is_in_handoff:
                raise misfit(f"fault_injection.rules.{index}.point", f"mode colocated hands nothing over, and never comes to {rule.point}")
        return self

    @model_validator(mode="after")
    def _pools_fit(self) -> BatonConfig:
        for name, pool in (("prefill", self.prefill), ("decode", self.decode)):
            if (pool.scheme == "float32") != (pool.kv_dtype == "float32"):
                raise misfit(f"{name}.kv_dtype", "float32 goes with scheme float32, and only with it")
            if pool.kv_dtype == "int8" and pool.kernels != "native":
                raise misfit(f"{name}.kv_dtype", "int8 needs kernels native")
            if pool.max_num_seqs > pool.max_num_batched_tokens:  # decode rows go first: prompts would never get a turn
                raise misfit(f"{name}.max_num_seqs", f"must be at most {name}.max_num_batched_tokens ({pool.max_num_batched_tokens})")
        if self.mode == "disaggregated":
            source, destination = self.prefill.kv_dtype, self.decode.kv_dtype
            if not can_become(source, destination):
                raise misfit("decode.kv_dtype", f"KV that the prefill pool stores as {source} cannot become {destination}")
        return self


def load_config(args: dict[str, Any]) -> BatonConfig:
    """Checks `args` as a whole.

    Raises:
        ConfigError: with one line for every key at fault; `param` is the first.
    """
    try:
        return BatonConfig.model_validate(args)
    except ValidationError as error:
        items = _told(error.errors())
        raise ConfigError("\n".join(map(_describe, items)), param=_key(items[0]) or None) from error


def _told(items: Sequence[Any]) -> list[Any]:
    """Without a list's complaint of being too short when what it lacks are members that are wrong themselves."""
    return [item for item in items if item["type"] != "too_short" or not any(_is_inside(other, item) for other in items)]


def _is_inside(item: Any, section: Any) -> bool:
    return len(item["loc"]) > len(section["loc"]) and item["loc"][: len(section["loc"])] == section["loc"]


def _key(item: Any) -> str:
    parts = [*item["loc"], *([item["ctx"]["key"]] if item["type"] == "misfit" else [])]
    return ".".join(str(part) for part in parts)


def _describe(item: Any) -> str:
    key = _key(item) or "config"
    if item["type"] == "extra_forbidden":
        return f"{key}: no such key"
    if item["type"] == "missing":
        return f"{key}: is required"
    if item["type"] == "misfit":
        return f"{key}: {item['msg']}"
    return f"{key}: {item['msg'].removeprefix('Value error, ')} (got {item['input']!r})"
