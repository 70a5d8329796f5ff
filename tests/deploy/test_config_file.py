"""The shipped config is right, and every wrong one is refused by the names of its keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import BatonConfig
from cluster.errors import ConfigError
from deploy.config_file import load_serve_file
from deploy.gguf_import import import_gguf
from deploy.preflight import check_memory, check_model
from tests.deploy.tiny_gguf import write_gguf

LOCAL = Path(__file__).parents[2] / "deploy/local.yaml"


def content() -> dict[str, Any]:
    loaded = yaml.safe_load(LOCAL.read_text())
    assert isinstance(loaded, dict)
    return loaded


def write(folder: Path, value: Any) -> Path:
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(value))
    return path


def test_the_shipped_file_is_right() -> None:
    file = load_serve_file(LOCAL)
    assert file.url == "http://127.0.0.1:8000"
    assert file.application == "baton"
    schemes = (file.config.prefill.scheme, file.config.decode.scheme)
    assert schemes == ("int8", "int4"), "the pair that the README's figures and `benchmarks/results` are of"


def test_comments_of_the_shipped_file_show_real_defaults() -> None:
    """With every commented key switched on, the config is the same: no default in the file is out of date, none is misspelt."""
    on = re.sub(r"(?m)^(\s*)# (?=\s*(?:- \{|[a-z_]+:(?: |$)))", r"\1", LOCAL.read_text())
    switched = yaml.safe_load(on)["applications"][0]["args"]
    shipped = content()["applications"][0]["args"]
    assert switched["kv_transfer"]["lease_s"] == 30
    assert len(switched["router"]["classes"]) == 3
    switched.pop("served_model_name")  # these two show what the demo model gives
    switched.pop("max_model_len")
    assert BatonConfig.model_validate(switched) == BatonConfig.model_validate(shipped)


def test_overrides_and_port(tmp_path: Path) -> None:
    file = load_serve_file(LOCAL, ["decode.scheme=bf16", "prefill.scheme=bf16", "router.max_queued_requests=7"], port=8123)
    assert file.config.decode.scheme == "bf16"
    assert file.config.router.max_queued_requests == 7
    assert file.port == 8123
    assert file.schema.applications[0].args["router"]["max_queued_requests"] == 7, "what Serve deploys is what was checked"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("decode.schme=bf16", "decode.schme: no such key"),
        ("decode.replicas=0", "decode.replicas: Input should be greater than or equal to 1"),
        ("model=[1]", "model: Input should be a valid string"),
        ("decode.kv_cache_bytes=lots", "decode.kv_cache_bytes: must be a number of bytes"),
        ("model.name=x", "model.name: model is not a section"),
        ("decode.scheme={", "decode.scheme: not a YAML value"),
        ("decode.scheme", "must be key=value"),
        ("gateway.request_timeout_s=.nan", "gateway.request_timeout_s: "),
    ],
)
def test_wrong_values_are_named(override: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_serve_file(LOCAL, [override])
    assert line in caught.value.message


def test_every_key_at_fault_has_its_line() -> None:
    with pytest.raises(ConfigError) as caught:
        load_serve_file(LOCAL, ["decode.schme=bf16", "prefill.replicas=-1", "mod=1"])
    assert [line.split(":")[0] for line in caught.value.message.splitlines()] == ["prefill.replicas", "decode.schme", "mod"]


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ((), "proxy_locaton"),
        (("http_options",), "prot"),
        (("applications", 0), "route_prefx"),
    ],
)
def test_keys_that_serve_would_ignore_are_refused(tmp_path: Path, path: tuple[Any, ...], key: str) -> None:
    value = content()
    section: Any = value
    for part in path:
        section = section[part]
    section[key] = "x"
    dotted = ".".join([*map(str, path), key])
    with pytest.raises(ConfigError, match=f"^{dotted}: no such key$"):
        load_serve_file(write(tmp_path, value))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"http_options": {"port": "high"}}, "http_options.port"),
        ({"http_options": {"port": 65_536}}, "http_options.port: must be 1 to 65535"),
        ({"http_options": {"port": 0}}, "http_options.port"),
        ({"proxy_location": "Somewhere"}, "proxy_location"),
        ({"applications": []}, "applications: must be one application"),
        ({"applications": [{"name": "x", "import_path": "other:app"}]}, "import_path deploy.app:build"),
        ({"applications": [{"name": "baton", "import_path": "deploy.app:build"}]}, "model: is required"),
    ],
)
def test_serves_own_part_is_checked(tmp_path: Path, change: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_serve_file(write(tmp_path, content() | change))
    assert line in caught.value.message


@pytest.mark.parametrize("text", ["a: [", "\t: x", "- a\n- b", "", "a: \x00"])
def test_what_is_not_a_mapping_in_yaml_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"serve\.yaml"):
        load_serve_file(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        load_serve_file(tmp_path / "none.yaml")


def test_a_context_beyond_the_models_own_is_refused(tmp_path: Path) -> None:
    import_gguf(write_gguf(tmp_path / "model.gguf"), tmp_path)
    check_model(BatonConfig(model="x", max_model_len=128), tmp_path)
    with pytest.raises(ConfigError, match="own limit of 128") as caught:
        check_model(BatonConfig(model="x", max_model_len=129), tmp_path)
    assert caught.value.param == "max_model_len"


def test_a_pool_without_room_for_a_block_is_refused(tmp_path: Path) -> None:
    import_gguf(write_gguf(tmp_path / "model.gguf"), tmp_path)
    block_bytes = 2 * 2 * 2 * 16 * 32 * 2  # layers, K and V, heads, head_dim, tokens, bf16
    check_model(BatonConfig.model_validate({"model": "x", "decode": {"kv_cache_bytes": block_bytes}}), tmp_path)
    with pytest.raises(ConfigError, match=f"do not hold one block of {block_bytes:,}") as caught:
        check_model(BatonConfig.model_validate({"model": "x", "decode": {"kv_cache_bytes": block_bytes - 1}}), tmp_path)
    assert caught.value.param == "decode.kv_cache_bytes"


def test_kv_pools_larger_than_the_machine_are_refused() -> None:
    config = BatonConfig.model_validate({"model": "x", "decode": {"kv_cache_bytes": "2GiB"}, "prefill": {"kv_cache_bytes": "1GiB"}})
    check_memory(config, 3 * 2**30)
    with pytest.raises(ConfigError) as caught:
        check_memory(config, 3 * 2**30 - 1)
    assert caught.value.param == "decode.kv_cache_bytes"
    check_memory(config.model_copy(update={"mode": "colocated"}), 2 * 2**30)


def test_swap_space_larger_than_the_machine_is_refused() -> None:
    config = BatonConfig.model_validate({"model": "x", "decode": {"swap_bytes": "2GiB"}})
    check_memory(config, 2 * 2**30)
    with pytest.raises(ConfigError) as caught:
        check_memory(config, 2 * 2**30 - 1)
    assert caught.value.param == "decode.swap_bytes"
