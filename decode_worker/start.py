"""From the configuration to a decode worker that answers. Its own module, as it imports torch: `deployment` is imported elsewhere too."""

from __future__ import annotations

import asyncio
from pathlib import Path

from cluster.config import BatonConfig
from cluster.engine.build import build_engine
from cluster.kv_transfer.selection import PlaneContext, select_planes
from cluster.worker.process import prepare_process
from cluster.worker.settings import WorkerSettings
from decode_worker.worker import DecodeWorker


async def start_worker(config: BatonConfig, model_folder: Path, settings: WorkerSettings) -> DecodeWorker:
    """Loads the model, allocates the pool and serves.

    Raises:
        ConfigError: the model or the pool does not fit.
    """
    prepare_process(config.decode.threads)
    engine = await asyncio.to_thread(build_engine, config.decode, model_folder, max_model_len=config.max_model_len)
    context = PlaneContext(
        pool=engine.kv_cache.storage, incarnation=settings.identity.incarnation, host=settings.host, secret=settings.secret
    )
    planes = select_planes(config.kv_transfer.planes, context)
    worker = DecodeWorker(settings, engine, planes)
    await worker.start()
    return worker
