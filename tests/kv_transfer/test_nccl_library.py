"""What of cupy's NCCL can be checked without a device: that it is there, and which calls are made of a group."""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.errors import PlaneUnavailable, TransferError
from cluster.kv_transfer import nccl_library
from cluster.kv_transfer.nccl_device import Rows
from cluster.kv_transfer.nccl_library import CupyCommunicator, CupyDevice
from cluster.kv_transfer.selection import PlaneContext, publish, select_planes
from tests.kv_transfer.owner import SECRET, SMALL
from tests.kv_transfer.planes import HOST

UINT8 = 1  # NCCL_UINT8, in nccl.h


class Calls:
    """Stands in for the modules `cupy` and `cupy.cuda.nccl` and keeps what was asked of them, in order."""

    def __init__(self, **nccl: Any) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.fail_at: str | None = None
        self.error: Exception = RuntimeError("NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error")
        cuda = SimpleNamespace(Device=_Device, Stream=lambda non_blocking: self._object("stream", ptr=77), Event=self._event)
        self.cupy = SimpleNamespace(__version__="14.2.0", cuda=cuda)
        self.nccl = SimpleNamespace(
            NCCL_UINT8=UINT8,
            available=True,
            get_version=lambda: 23203,
            get_unique_id=lambda: bytes(range(128)),
            groupStart=self._recorder("groupStart"),
            groupEnd=self._recorder("groupEnd"),
            NcclCommunicator=self._communicator,
        )
        vars(self.nccl).update(nccl)

    def _recorder(self, name: str) -> Any:
        def record(*arguments: Any) -> None:
            self.made.append((name, *arguments))
            if name == self.fail_at:
                raise self.error

        return record

    def _object(self, name: str, **fields: Any) -> Any:
        return SimpleNamespace(synchronize=self._recorder(f"{name}.synchronize"), **fields)

    def _event(self, disable_timing: bool) -> Any:
        return SimpleNamespace(record=lambda stream: self.made.append(("record", stream.ptr)), done=True)

    def _communicator(self, *arguments: Any) -> Any:
        self._recorder("join")(*arguments)
        return SimpleNamespace(**{name: self._recorder(name) for name in ("send", "recv", "abort", "check_async_error")})


class _Device:
    def __init__(self, index: int) -> None:
        self.index = index

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def joined(calls: Calls, rank: int, num_ranks: int = 2) -> CupyCommunicator:
    communicator = CupyDevice(calls.cupy, calls.nccl, 0).join(b"id", rank, num_ranks)
    calls.made.clear()
    return communicator


class TestGroup:
    @pytest.mark.parametrize(("rank", "num_ranks", "peer"), [(0, 2, 1), (1, 2, 0), (0, 1, 0)])
    def test_is_a_send_or_receive_for_each_row(self, rank: int, num_ranks: int, peer: int) -> None:
        calls = Calls()
        communicator = joined(calls, rank, num_ranks)
        tensor = torch.zeros(10, 48, dtype=torch.uint8)
        start = tensor.data_ptr()
        group = communicator.post(send=Rows(tensor, [3, 0]), receive=Rows(tensor, [9, 4]))
        assert calls.made == [
            ("groupStart",),
            ("send", start + 3 * 48, 48, UINT8, peer, 77),
            ("send", start, 48, UINT8, peer, 77),
            ("recv", start + 9 * 48, 48, UINT8, peer, 77),
            ("recv", start + 4 * 48, 48, UINT8, peer, 77),
            ("groupEnd",),
            ("record", 77),
        ]
        assert communicator.is_done(group)
        assert calls.made[-1] == ("check_async_error",)

    @pytest.mark.parametrize("step", ["groupStart", "recv", "groupEnd"])
    def test_that_goes_wrong_is_ended_and_told(self, step: str) -> None:
        calls = Calls()
        communicator = joined(calls, 0)
        calls.fail_at = step
        with pytest.raises(TransferError, match="NCCL_ERROR_REMOTE_ERROR: remote process exited"):
            communicator.post(receive=Rows(torch.zeros(1, 8, dtype=torch.uint8), [0]))
        assert [call[0] for call in calls.made].count("groupEnd") == (0 if step == "groupStart" else 1)
        assert "record" not in [call[0] for call in calls.made]

    def test_whose_error_cupy_has_no_name_for(self) -> None:
        calls = Calls()
        communicator = joined(calls, 0)
        group = communicator.post(receive=Rows(torch.zeros(1, 8, dtype=torch.uint8), [0]))
        calls.fail_at, calls.error = "check_async_error", KeyError(7)
        with pytest.raises(TransferError, match="status 7"):
            communicator.is_done(group)

    def test_after_an_abort(self) -> None:
        calls = Calls()
        communicator = joined(calls, 0)
        communicator.abort()
        assert calls.made == [("abort",), ("stream.synchronize",)]
        with pytest.raises(TransferError, match="was aborted"):
            communicator.post()
        with pytest.raises(TransferError, match="was aborted"):
            communicator.is_done(object())

    def test_an_abort_that_fails_waits_for_the_stream_all_the_same(self) -> None:
        calls = Calls()
        communicator = joined(calls, 0)
        calls.fail_at = "abort"
        with pytest.raises(TransferError):
            communicator.abort()
        assert calls.made[-1] == ("stream.synchronize",)


class TestLibrary:
    def test_that_is_not_installed_is_said_once(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cupy" else find_spec(name))
        pool = torch.zeros(1, SMALL.block_bytes, dtype=torch.uint8)
        planes = select_planes(["nccl", "grpc"], PlaneContext(pool, "incarnation", HOST, SECRET))
        assert [plane.name for plane in planes] == ["grpc"]
        assert caplog.messages == ["no nccl plane: the package cupy is not installed"]

    async def test_does_not_read_a_pool_in_host_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nccl_library, "is_installed", lambda: True)
        (plane,) = select_planes(["nccl"], PlaneContext(torch.zeros(1, SMALL.block_bytes, dtype=torch.uint8), "incarnation", HOST, SECRET))
        with pytest.raises(PlaneUnavailable, match="the pool is in cpu memory, NCCL moves device memory"):
            await publish([plane])
        await plane.close()

    @pytest.mark.parametrize(
        ("calls", "reason"),
        [
            (Calls(available=False), "does not find NCCL"),
            (Calls(get_version=lambda: 21602), "NCCL 21602 is too old, 21801 is needed"),
        ],
    )
    def test_that_will_not_do(self, calls: Calls, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib, "import_module", {"cupy": calls.cupy, "cupy.cuda.nccl": calls.nccl}.__getitem__)
        with pytest.raises(PlaneUnavailable, match=reason):
            nccl_library.load()

    def test_of_an_older_cupy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = Calls()
        calls.cupy.__version__ = "13.6.0"  # its unique ids are tuples
        monkeypatch.setattr(importlib, "import_module", {"cupy": calls.cupy, "cupy.cuda.nccl": calls.nccl}.__getitem__)
        with pytest.raises(PlaneUnavailable, match=r"cupy 13\.6\.0 is too old, 14 is needed"):
            nccl_library.load()

    def test_that_cannot_be_loaded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(_name: str) -> None:  # as cupy does it
            raise ImportError("\n=====\nFailed to import CuPy.\n\nOriginal error:\n  ImportError: libcuda.so.1 is missing\n=====\n")

        monkeypatch.setattr(importlib, "import_module", fail)
        with pytest.raises(PlaneUnavailable, match=r"^cupy cannot be imported: +ImportError: libcuda\.so\.1 is missing$"):
            nccl_library.load()

    @pytest.mark.parametrize(("host", "interface"), [("127.0.0.1", "lo"), ("0.0.0.0", None)])
    def test_sockets_stay_on_loopback_with_the_worker(self, host: str, interface: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
        monkeypatch.setattr(nccl_library, "load", lambda: (None, None))
        pool: Any = SimpleNamespace(device=torch.device("cuda", 1))
        nccl_library.open_device(pool, host)
        assert os.environ.get("NCCL_SOCKET_IFNAME") == interface
        monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
