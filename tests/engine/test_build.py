"""From config and folder to an engine: sizes, and refusals by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from cluster.config import EngineConfig
from cluster.engine.build import allocate_private, build_engine
from cluster.errors import ConfigError
from cluster.host_memory import available_bytes
from tests.tiny_models import VOCAB_SIZE, tiny_model


def config(**fields: object) -> EngineConfig:
    return EngineConfig.model_validate({"scheme": "bf16", "kv_cache_bytes": "2MiB", "swap_bytes": "1MiB", **fields})


def test_engine_takes_its_sizes_from_config_and_model() -> None:
    engine = build_engine(config(reserve_fraction=0.25, max_num_seqs=7), tiny_model("llama"), max_model_len=200)
    assert engine.num_blocks == 2 * 2**20 // engine.layout.block_bytes
    assert engine.kv_cache.storage.shape == (engine.num_blocks, engine.layout.block_bytes)
    assert engine.limits.num_reserved_blocks == engine.num_blocks // 4
    assert (engine.max_model_len, engine.limits.max_num_seqs) == (200, 7)
    assert engine.identity.vocab_size == VOCAB_SIZE and engine.identity.eos_token_ids
    assert engine.domain != build_engine(config(scheme="int8"), tiny_model("llama")).domain


def test_a_private_pool_is_there_from_the_start() -> None:
    """A page that only comes when it is written is missing hours later, to the kernel's killer and not to the config's check."""
    before_bytes = resident_bytes()
    pool = allocate_private(64 * 2**20)
    assert resident_bytes() - before_bytes > 60 * 2**20
    assert not pool.any()
    assert pool.data_ptr() % (2 << 20) == 0, "decode reads the pool end to end: it belongs on huge pages"


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no huge pages")
def test_a_private_pool_asks_for_huge_pages() -> None:
    pool = allocate_private(64 * 2**20)
    assert "hg" in mapping_flags(pool.data_ptr())


def mapping_flags(address: int) -> list[str]:
    """What the system knows of the mapping around an address: see proc(5), `VmFlags`."""
    is_around = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if not head.endswith(":"):
            start, end = (int(bound, 16) for bound in head.split("-"))
            is_around = start <= address < end
        elif is_around and head == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("no mapping is around the address")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_pool_lies_in_the_memory_it_is_given() -> None:
    given: list[torch.Tensor] = []

    def allocate(num_bytes: int) -> torch.Tensor:
        given.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return given[-1]

    engine = build_engine(config(), tiny_model("llama"), allocate=allocate)
    engine.kv_cache.storage[0, 0] = 9
    assert given[0][0] == 9


@pytest.mark.parametrize("kv_cache_bytes", [100, 2**60])
def test_a_pool_that_does_not_fit_is_refused_by_name(kv_cache_bytes: int) -> None:
    with pytest.raises(ConfigError, match=r"^kv_cache_bytes: ") as caught:
        build_engine(config(kv_cache_bytes=kv_cache_bytes), tiny_model("llama"))
    assert caught.value.param == "kv_cache_bytes"


def test_a_swap_space_beyond_all_memory_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^swap_bytes: ") as caught:
        build_engine(config(swap_bytes=2**60), tiny_model("llama"))
    assert caught.value.param == "swap_bytes"


def test_available_memory_is_that_of_a_machine() -> None:
    assert 2**26 < available_bytes() < 2**50
