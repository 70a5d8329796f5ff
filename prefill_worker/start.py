"""From the configuration to a prefill worker that answers. Its own module, as it imports torch: `deployment` is imported elsewhere too."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from cluster.config import BatonConfig
from cluster.engine.build import allocate_private, build_engine
from cluster.kv_transfer.pool_memory import PoolMemory
from cluster.kv_transfer.selection import PlaneContext, select_planes
from cluster.worker.process import prepare_process
from cluster.worker.settings import WorkerSettings
from prefill_worker.worker import PrefillWorker


async def start_worker(config: BatonConfig, model_folder: Path, settings: WorkerSettings) -> PrefillWorker:
    """Loads the model, allocates the pool and serves.

    Raises:
        ConfigError: the model or the pool does not fit.
        PlaneUnavailable: the pool can be read on no data plane.
    """
    prepare_process(config.prefill.threads)
    memory = PoolMemory() if "shared_memory" in config.kv_transfer.planes and sys.platform == "linux" else None
    allocate = allocate_private if memory is None else memory.allocate
    engine = await asyncio.to_thread(build_engine, config.prefill, model_folder, max_model_len=config.max_model_len, allocate=allocate)
    context = PlaneContext(
        pool=engine.kv_cache.storage, incarnation=settings.identity.incarnation, host=settings.host, secret=settings.secret, memory=memory
    )
    planes = select_planes(config.kv_transfer.planes, context)
    worker = PrefillWorker(settings, engine, planes)
    await worker.start()
    return worker
