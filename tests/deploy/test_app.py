"""The application that a config describes, before Serve has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.serve import Deployment

from cluster.errors import ConfigError
from deploy.app import build
from tests.deploy.tiny_gguf import write_gguf


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    return str(write_gguf(tmp_path / "tiny.gguf", weights=True))


def deployments(args: dict[str, Any]) -> dict[str, tuple[Deployment, tuple[Any, ...]]]:
    """Every bound deployment with its constructor's arguments, by name."""
    found: dict[str, tuple[Deployment, tuple[Any, ...]]] = {}
    waiting = [build(args)]
    while waiting:
        bound = waiting.pop()._bound_deployment
        found[bound.name] = (bound, bound.init_args)
        for argument in bound.init_args:
            nested = argument.values() if isinstance(argument, dict) else [argument]
            waiting += [item for item in nested if type(item).__name__ == "Application"]
    return found


def test_two_pools(model: str) -> None:
    pool = {"replicas": 3, "num_cpus": 0.25, "threads": 2, "drain_timeout_s": 7, "resources": {"big_memory": 1}}
    found = deployments({"model": model, "prefill": pool, "gateway": {"replicas": 2}})
    assert set(found) == {"Gateway", "Router", "Prefill", "Decode"}
    prefill = found["Prefill"][0]
    assert prefill.num_replicas == 3
    assert prefill.ray_actor_options is not None
    assert prefill.ray_actor_options["num_cpus"] == 0.25
    assert prefill.ray_actor_options["resources"] == {"big_memory": 1}
    environment = prefill.ray_actor_options["runtime_env"]["env_vars"]
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["OMP_WAIT_POLICY"] == "passive"
    assert prefill._deployment_config.graceful_shutdown_timeout_s == 12, "the drain, and time to close"
    assert found["Gateway"][0].num_replicas == 2
    assert found["Router"][0].num_replicas == 1


def test_colocated_has_one_pool(model: str) -> None:
    assert set(deployments({"model": model, "mode": "colocated"})) == {"Gateway", "Router", "Decode"}


def test_all_parts_share_what_the_config_leaves_open(model: str) -> None:
    configs = [arguments[0] for _, arguments in deployments({"model": model}).values()]
    assert len({config.cluster_secret for config in configs}) == 1
    assert len(configs[0].cluster_secret) >= 32
    assert configs[0].served_model_name == "tiny"
    again = next(iter(deployments({"model": model}).values()))[1][0]
    assert again.cluster_secret != configs[0].cluster_secret, "drawn at each start"


def test_what_the_config_says_is_kept(model: str) -> None:
    config = deployments({"model": model, "cluster_secret": "s3cret", "served_model_name": "mine"})["Router"][1][0]
    assert (config.cluster_secret, config.served_model_name) == ("s3cret", "mine")


@pytest.mark.parametrize(("change", "key"), [({"model": "none"}, "model"), ({"max_model_len": 129}, "max_model_len"), ({"mod": 1}, "mod")])
def test_what_cannot_work_is_refused(model: str, change: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build({"model": model} | change)
    assert caught.value.param == key
