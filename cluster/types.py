"""The values that cross Baton's processes. All are frozen; text exists only in the gateway, here are token ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from cluster.kv_layout import KVLayout


class FinishReason(StrEnum):
    """Why a sequence ended. The first two are the OpenAI API's own words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class WorkerRole(StrEnum):
    """What a pool does. `colocated` prefills and decodes in one engine: the baseline, and the oracle of promise P1."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class WorkerState(StrEnum):
    """One life of a worker, as the router sees it."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Every field is final: defaults are filled in and checked by the gateway."""

    max_tokens: int
    seed: int  # always set: the gateway draws one for an unseeded request, so that a retry repeats the same text
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # without the model's own EOS ids, which `ignore_eos` governs
    ignore_eos: bool = False
    num_logprobs: int | None = None  # None: none; 0: the chosen token's; n: also those of the n likeliest


@dataclass(frozen=True, slots=True, order=True)
class OrderKey:
    """The one order of every queue (promise P4): stamped once by the router, compared everywhere, never changed.

    `virtual_deadline_s` is the router's clock at admission plus the slack of the request's priority; `arrival` breaks ties.
    """

    virtual_deadline_s: float
    arrival: int


@dataclass(frozen=True, slots=True)
class Request:
    """One attempt at one request, as engines see it."""

    request_id: str
    attempt: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    order_key: OrderKey
    cache_salt: str = ""  # tenants with different salts never share a prefix block
    # Given out by earlier attempts, the first token included: their KV is computed again, one decode step each, and they are not given out.
    generated_token_ids: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """Names this attempt within a worker."""
        return f"{self.request_id}/{self.attempt}"

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


def request_id_of(key: str) -> str:
    """The request's id in a `Request.key`, whichever attempt."""
    return key.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One generated token. `logprob` and `top_logprobs` are the model's own (before temperature and penalties)."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first


@dataclass(frozen=True, slots=True)
class KVPeer:
    """How a decode worker reads the KV of one prefill worker."""

    incarnation: str  # of the prefill worker
    plane: str
    reason: str  # why this plane and none before it


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's report to the router: who it is, what it can hold, and what it holds now."""

    worker_id: str  # stable name of the replica
    incarnation: str  # one life of it
    role: WorkerRole
    state: WorkerState
    endpoint: str  # host:port of its gRPC server
    node_id: str
    checkpoint: str  # fingerprint of the weights' files and the model's config
    domain: str  # numerics domain: scheme, KV dtype, kernel set
    max_model_len: int
    layout: KVLayout  # of its KV blocks
    num_blocks: int
    num_reserved_blocks: int  # kept back from admission, so that running sequences can grow
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks_free: int = 0
    num_blocks_cached: int = 0  # evictable, so as good as free
    num_blocks_owned: int = 0
    num_blocks_leased: int = 0
    num_seqs_waiting: int = 0
    num_seqs_running: int = 0
    num_tokens_waiting: int = 0  # prompt tokens not yet computed
    live_requests: tuple[str, ...] = ()  # `Request.key` of all it holds
    num_steps: int = 0
    num_tokens_total: int = 0
    kv_peers: tuple[KVPeer, ...] = ()  # the prefill workers it reads from

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.layout.block_size


@dataclass(frozen=True, slots=True)
class ReportReply:
    """What a worker learns from its report."""

    router_epoch: int


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Where to call one life of a worker."""

    worker_id: str
    incarnation: str
    endpoint: str


@dataclass(frozen=True, slots=True)
class AdmitRequest:
    """What the router needs to know of a request; it sees no tokens."""

    request_id: str
    gateway_id: str  # one life of a gateway: its placements end with it
    num_prompt_tokens: int
    max_tokens: int
    priority: int = 0  # lower first
    timeout_s: float | None = None  # what is left of the request's deadline
    order_key: OrderKey | None = None  # set when an admitted request is submitted again
    waited_s: float = 0.0  # since it was first submitted, when a router died with it in its queue: it keeps its place
    exclude: tuple[str, ...] = ()  # incarnations that failed this request before


@dataclass(frozen=True, slots=True)
class Placement:
    """The router's answer: which workers serve the request. `prefill` is None where one worker does both."""

    request_id: str
    router_epoch: int
    order_key: OrderKey
    decode: WorkerAddress
    prefill: WorkerAddress | None = None
    queue_time_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StageTimings:
    """Where a request's time went (promise P5): durations only, since clocks of processes differ."""

    gateway_s: float = 0.0  # parse, render, tokenize
    queue_s: float = 0.0  # in the router's queue
    prefill_wait_s: float = 0.0  # at the prefill worker, before its first chunk
    prefill_s: float = 0.0  # first chunk to first token
    transfer_s: float = 0.0  # reading the KV blocks and the commit
    decode_wait_s: float = 0.0  # at the decode worker: for blocks, then for the batch
    first_step_s: float = 0.0  # the step that made the second token
    extra: dict[str, float] = field(default_factory=dict)
