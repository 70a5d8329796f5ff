"""What a worker is told at its start, whichever kind it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from cluster.config import PoolConfig, TransferConfig
from cluster.faults.injector import NO_FAULTS, FaultInjector
from cluster.worker.identity import WorkerIdentity
from cluster.worker.reporter import Send


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The part of the configuration that concerns one worker, and its ties to the process it runs in."""

    identity: WorkerIdentity
    pool: PoolConfig
    transfer: TransferConfig
    secret: str
    send: Send  # carries load reports to the router
    host: str = "127.0.0.1"
    published_host: str | None = None  # where others reach `host`, when it stands for all addresses
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    faults: FaultInjector = NO_FAULTS
