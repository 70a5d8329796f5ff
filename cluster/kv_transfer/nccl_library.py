"""NCCL through cupy, if this machine has both and a device: all calls that need one are here. They have not run on a device yet.

The signatures are those of cupy 14.2 (`cupy_backends/cuda/libs/nccl.pyx`), looked up in its wheel beside NCCL 2.32, without a device:
`get_unique_id() -> bytes` (a tuple before cupy 14), `NcclCommunicator(ndev, commId, rank)`, `send(pointer, count, datatype, peer, stream)`,
`recv` likewise, `check_async_error()`, `abort()`, `groupStart()`, `groupEnd()`. cupy makes blocking communicators alone: the constructor
waits for the other rank, and there is no way to call it back. Ray (`ray/experimental/channel/nccl_group.py`) and vLLM
(`P2pNcclEngine`) send and receive on streams of their own in the same way.

No buffer is registered with NCCL, so only the kernel that a rank has started itself writes to the rows that it receives into: once the
stream has done it, or `ncclCommAbort` has ended it, these rows are left alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any, Final

import torch

from cluster.errors import PlaneUnavailable, TransferError
from cluster.kv_transfer.loopback import is_loopback
from cluster.kv_transfer.nccl_device import Rows

_MIN_CUPY: Final = 14
_MIN_NCCL: Final = 21801  # what wheels of cupy 14 ask for


def is_installed() -> bool:
    """Whether cupy is there; whether it can be used is seen by `open_device`."""
    return importlib.util.find_spec("cupy") is not None


def open_device(pool: torch.Tensor, host: str) -> CupyDevice:
    """The device that `pool` lies on. Takes seconds the first time; what it sets for NCCL counts until the process ends.

    Args:
        pool: the KV pool.
        host: the worker binds to it. A loopback address keeps NCCL's sockets on the loopback device too.

    Raises:
        PlaneUnavailable: the pool is in host memory, or cupy or NCCL is missing or too old.
    """
    if pool.device.type != "cuda":
        raise PlaneUnavailable(f"the pool is in {pool.device.type} memory, NCCL moves device memory")
    if is_loopback(host):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    cupy, nccl = load()
    return CupyDevice(cupy, nccl, pool.device.index or 0)


def load() -> tuple[Any, Any]:
    """The modules `cupy` and `cupy.cuda.nccl`.

    Raises:
        PlaneUnavailable: one is missing, cannot be loaded, or is too old.
    """
    try:
        cupy = importlib.import_module("cupy")
        nccl = importlib.import_module("cupy.cuda.nccl")  # no attribute of cupy.cuda before it is imported
    except ImportError as error:
        reason = str(error).strip().splitlines()  # cupy prints a page, with the reason last but for a rule
        raise PlaneUnavailable(f"cupy cannot be imported: {' '.join(line for line in reason[-2:] if line.strip('='))}") from error
    if int(cupy.__version__.partition(".")[0]) < _MIN_CUPY:
        raise PlaneUnavailable(f"cupy {cupy.__version__} is too old, {_MIN_CUPY} is needed")
    if not nccl.available:
        raise PlaneUnavailable("cupy does not find NCCL: the package nvidia-nccl-cu12, or -cu13, brings it")
    if nccl.get_version() < _MIN_NCCL:
        raise PlaneUnavailable(f"NCCL {nccl.get_version()} is too old, {_MIN_NCCL} is needed")
    return cupy, nccl


class CupyDevice:
    """One CUDA device; `cluster.kv_transfer.nccl_device.Device`."""

    def __init__(self, cupy: Any, nccl: Any, index: int) -> None:
        """
        Args:
            cupy: the module.
            nccl: `cupy.cuda.nccl`.
            index: of the device among those of this process.
        """
        self.cupy = cupy
        self.nccl = nccl
        self._index = index

    def current(self) -> AbstractContextManager[Any]:
        """Within it, CUDA's calls of this thread mean this device."""
        context: AbstractContextManager[Any] = self.cupy.cuda.Device(self._index)
        return context

    @property
    def version(self) -> int:
        return int(self.nccl.get_version())

    def unique_id(self) -> bytes:
        with _transfer_errors():
            found: bytes = self.nccl.get_unique_id()
        return found

    def join(self, unique_id: bytes, rank: int, num_ranks: int = 2) -> CupyCommunicator:
        with _transfer_errors(), self.current():
            communicator = self.nccl.NcclCommunicator(num_ranks, unique_id, rank)
            stream = self.cupy.cuda.Stream(non_blocking=True)  # beside the default stream, which the engine may use
        peer = num_ranks - 1 - rank  # the other of two, or itself
        return CupyCommunicator(self, communicator, stream, peer)


class CupyCommunicator:
    """One rank; `cluster.kv_transfer.nccl_device.Communicator`."""

    def __init__(self, device: CupyDevice, communicator: Any, stream: Any, peer: int) -> None:
        """
        Args:
            device: where it is.
            communicator: cupy's.
            stream: cupy's, on which groups go one after the other.
            peer: rank that it sends to and receives from.
        """
        self._device = device
        self._communicator = communicator
        self._stream = stream
        self._peer = peer
        self._aborted = False
        self._aborting = Lock()

    def post(self, *, send: Rows | None = None, receive: Rows | None = None) -> object:
        self._check()
        with _transfer_errors(), self._device.current():
            self._device.nccl.groupStart()
            try:
                self._each(self._communicator.send, send)
                self._each(self._communicator.recv, receive)
            finally:
                self._device.nccl.groupEnd()  # also of a group that went wrong: NCCL counts them for each thread
            event = self._device.cupy.cuda.Event(disable_timing=True)
            event.record(self._stream)
        return event

    def is_done(self, group: Any) -> bool:
        self._check()
        with _transfer_errors(), self._device.current():
            self._communicator.check_async_error()
            return bool(group.done)

    def abort(self) -> None:
        self._aborted = True
        with self._aborting, _transfer_errors(), self._device.current():
            try:
                self._communicator.abort()  # a second time, cupy does nothing
            finally:
                self._stream.synchronize()

    def _each(self, move: Any, rows: Rows | None) -> None:
        """`move` is `send` or `recv`; see the module."""
        if rows is None:
            return
        start, row_bytes = rows.tensor.data_ptr(), rows.tensor.shape[1]
        for index in rows.indexes:
            move(start + index * row_bytes, row_bytes, self._device.nccl.NCCL_UINT8, self._peer, self._stream.ptr)

    def _check(self) -> None:
        if self._aborted:
            raise TransferError("the communicator was aborted")


@contextmanager
def _transfer_errors() -> Iterator[None]:
    """CUDA's and NCCL's errors in words. For a status that cupy has no name for, it raises a KeyError with the number."""
    try:
        yield
    except TransferError:
        raise
    except KeyError as error:
        raise TransferError(f"NCCL: status {error}") from error
    except Exception as error:
        raise TransferError(f"NCCL: {error}") from error
