"""What a comparison of modes compares: equal means for both modes, and one ratio a round."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmarks.load.driver import LoadResult
from benchmarks.load.trace import Chunk, Trace
from benchmarks.mode_comparison import colocated_overrides, ratios
from cluster.config import load_config
from cluster.errors import ConfigError
from deploy.config_file import IMPORT_PATH, load_serve_file

ARGS = {"model": "m", "prefill": {"replicas": 2, "threads": 3, "kv_cache_bytes": "100MiB"}, "decode": {"threads": 2, "scheme": "bf16"}}


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_colocated_gets_the_means_of_both_pools(num_workers: int, tmp_path: Path) -> None:
    config = load_config(ARGS)
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump({"applications": [{"name": "baton", "import_path": IMPORT_PATH, "args": ARGS}]}))
    colocated = load_serve_file(file, colocated_overrides(config, num_workers)).config
    assert colocated.mode == "colocated"
    assert colocated.decode.scheme == "bf16"
    assert colocated.decode.replicas == num_workers
    assert colocated.decode.threads * num_workers == 8
    assert colocated.decode.kv_cache_bytes * num_workers == 200 * 2**20 + config.decode.kv_cache_bytes
    assert colocated.decode.num_cpus * num_workers == pytest.approx(3.0)


def test_threads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ConfigError, match="8 threads cannot be shared by 3"):
        colocated_overrides(load_config(ARGS), 3)


def test_a_ratio_compares_neighbours_in_time() -> None:
    rounds = {"disaggregated": [[_result(80), _result(100)], [_result(30)]], "colocated": [[_result(100)], [_result(50), _result(70)]]}
    assert ratios(rounds) == pytest.approx([0.9, 0.5])


def _result(tokens: int) -> LoadResult:
    return LoadResult(1.0, (Trace(0.0, 0.0, 1.0, (Chunk(0.5, 1, None),), 8, tokens),))
