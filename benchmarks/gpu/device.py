"""The device that figures are measured on, or why there is none."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

import torch

from cluster.errors import PlaneUnavailable
from cluster.kv_transfer.nccl_library import CupyDevice, load


class NoDevice(Exception):
    """Nothing can be measured here; says why."""


@dataclass(frozen=True, slots=True)
class DeviceDescription:
    """A device and the versions that drive it."""

    name: str
    count: int  # of devices that this process sees
    memory_gib: float
    multiprocessors: int
    compute_capability: str
    driver: str  # of NVIDIA
    driver_cuda: int  # the newest CUDA that the driver knows: 13000 is 13.0
    runtime_cuda: int  # that cupy uses
    nccl: int  # that cupy has loaded: 22703 is 2.27.3
    cupy: str
    torch: str
    torch_cuda: str


def find_device() -> CupyDevice:
    """The first device, as the nccl plane uses it.

    Raises:
        NoDevice: torch sees none, or cupy or NCCL is missing.
    """
    if torch.version.cuda is None:
        raise NoDevice(f"torch {torch.__version__} is a build without CUDA")
    if not torch.cuda.is_available():
        raise NoDevice("torch sees no CUDA device")
    try:
        cupy, nccl = load()
    except PlaneUnavailable as error:
        raise NoDevice(error.message) from error
    return CupyDevice(cupy, nccl, 0)


def describe_device(device: CupyDevice) -> DeviceDescription:
    """Of the first device."""
    properties = torch.cuda.get_device_properties(0)
    runtime = device.cupy.cuda.runtime
    return DeviceDescription(
        name=properties.name,
        count=torch.cuda.device_count(),
        memory_gib=round(properties.total_memory / 2**30, 1),
        multiprocessors=properties.multi_processor_count,
        compute_capability=f"{properties.major}.{properties.minor}",
        driver=_driver_version(),
        driver_cuda=int(runtime.driverGetVersion()),
        runtime_cuda=int(runtime.runtimeGetVersion()),
        nccl=device.version,
        cupy=str(device.cupy.__version__),
        torch=torch.__version__,
        torch_cuda=str(torch.version.cuda),
    )


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
