"""The router's books as plain JSON values: its share of `GET /v1/cluster`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from cluster.types import WorkerLoad, WorkerRole
from router.control.pairing import limits_of
from router.control.queue import PriorityQueue
from router.control.workers import Worker, WorkerRegistry

T = TypeVar("T")


def cluster(registry: WorkerRegistry, roles: Iterable[WorkerRole], now_s: float) -> dict[str, Any]:
    """Pools with their workers, and what they can hold at most."""
    pools = {role: [worker for worker in registry if worker.load.role is role] for role in roles}
    running = {role: [w.load for w in workers if registry.takes_work(w, now_s)] for role, workers in pools.items()}
    limits = limits_of(running)
    return {
        "max_model_len": limits.max_model_len,
        "max_prompt_len": limits.max_prompt_len,
        "pools": {role.value: pool(registry, workers, now_s) for role, workers in pools.items()},
    }


def pool(registry: WorkerRegistry, workers: Sequence[Worker], now_s: float) -> dict[str, Any]:
    """One pool: its workers, and the KV blocks of those that are heard added up: what a silent one last said is over if it has died."""
    totals: Counter[str] = Counter(dict.fromkeys(("free", "cached", "owned", "leased", "total"), 0))
    for worker in workers:
        if registry.is_heard(worker, now_s):
            totals.update(_blocks(worker.load))
    return {"workers": [_worker(registry, worker, now_s) for worker in workers], "kv_blocks": dict(totals)}


def queue(items: PriorityQueue[T], class_names: Sequence[str], now_s: float) -> dict[str, Any]:
    """The queue, in total and by class."""
    by_class = {name: asdict(gauge) for name, gauge in items.by_class(class_names, now_s).items()}
    return {"num_requests": len(items), "num_tokens": items.num_tokens, "by_class": by_class}


def worker_counts(registry: WorkerRegistry, now_s: float) -> Counter[tuple[str, str]]:
    """Workers by (role, state)."""
    return Counter((worker.load.role.value, _state(registry, worker, now_s)) for worker in registry)


def _worker(registry: WorkerRegistry, worker: Worker, now_s: float) -> dict[str, Any]:
    load = worker.load
    return {
        "worker_id": load.worker_id,
        "incarnation": load.incarnation,
        "endpoint": load.endpoint,
        "node_id": load.node_id,
        "state": _state(registry, worker, now_s),
        "age_s": now_s - worker.heard_at_s,
        "checkpoint": load.checkpoint,
        "domain": load.domain,
        "max_model_len": load.max_model_len,
        "block_size": load.block_size,
        "kv_blocks": _blocks(load),
        "num_seqs_running": load.num_seqs_running,
        "num_seqs_waiting": load.num_seqs_waiting,
        "num_tokens_waiting": load.num_tokens_waiting,
        "num_steps": load.num_steps,
        "num_tokens_total": load.num_tokens_total,
        "kv_peers": [asdict(peer) for peer in load.kv_peers],
    }


def _blocks(load: WorkerLoad) -> dict[str, int]:
    return {
        "free": load.num_blocks_free,
        "cached": load.num_blocks_cached,
        "owned": load.num_blocks_owned,
        "leased": load.num_blocks_leased,
        "total": load.num_blocks,
    }


def _state(registry: WorkerRegistry, worker: Worker, now_s: float) -> str:
    """The worker's own word while it is heard, then `silent`."""
    return worker.load.state.value if registry.is_heard(worker, now_s) else "silent"
