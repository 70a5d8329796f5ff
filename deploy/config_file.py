"""Reads a Serve config file as `baton serve` takes it, and refuses what is wrong in it before anything starts.

The file is Serve's own format, so `serve run` and `serve deploy` take it too. Serve ignores keys that it does not know; here such a
key is an error, because a setting that silently does nothing is worse than a start that fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.schema import DeploymentSchema, HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema, gRPCOptionsSchema

from cluster.config import BatonConfig, load_config
from cluster.errors import ConfigError

IMPORT_PATH: Final = "deploy.app:build"
_MAX_PORT: Final = 65_535


@dataclass(frozen=True)
class ServeFile:
    """A checked file: Serve's part, and Baton's part (the args of its one application)."""

    schema: ServeDeploySchema
    config: BatonConfig

    @property
    def application(self) -> str:
        """The application's name."""
        return str(self.schema.applications[0].name)

    @property
    def host(self) -> str:
        """The address that HTTP is served on."""
        return str(self.schema.http_options.host)

    @property
    def port(self) -> int:
        """The port that HTTP is served on."""
        return int(self.schema.http_options.port)

    @property
    def url(self) -> str:
        """Where a client on this machine reaches the application."""
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        prefix = (self.schema.applications[0].route_prefix or "/").rstrip("/")
        return f"http://{host}:{self.port}{prefix}"


def load_serve_file(path: Path, overrides: Sequence[str] = (), port: int | None = None) -> ServeFile:
    """Reads and checks `path`.

    Args:
        overrides: `key=value` each; a dotted key of Baton's config, and a YAML value.
        port: replaces `http_options.port`.

    Raises:
        ConfigError: one line for every key at fault.
    """
    content = _read(path)
    if port is not None:
        content["http_options"] = {**(content.get("http_options") or {}), "port": port}
    schema = _serve_schema(content)
    if not 1 <= schema.http_options.port <= _MAX_PORT:
        raise ConfigError(f"http_options.port: must be 1 to {_MAX_PORT} (got {schema.http_options.port})", param="http_options.port")
    if len(schema.applications) != 1 or schema.applications[0].import_path != IMPORT_PATH:
        raise ConfigError(f"applications: must be one application with import_path {IMPORT_PATH}", param="applications")
    args = schema.applications[0].args
    for override in overrides:
        _set(args, override)
    return ServeFile(schema, load_config(args))


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold keys and values")
    return content


def _serve_schema(content: dict[str, Any]) -> ServeDeploySchema:
    unknown = list(_unknown_keys(content))
    if unknown:
        raise ConfigError("\n".join(f"{key}: no such key" for key in unknown), param=unknown[0])
    try:
        return ServeDeploySchema.model_validate(content)
    except ValidationError as error:
        found = [(".".join(map(str, item["loc"])), item["msg"].removeprefix("Value error, ")) for item in error.errors()]
        raise ConfigError("\n".join(f"{key}: {message}" for key, message in found), param=found[0][0]) from error


def _unknown_keys(content: Mapping[str, Any]) -> Iterator[str]:
    yield from _unknown(content, ServeDeploySchema, "")
    yield from _unknown(content.get("http_options"), HTTPOptionsSchema, "http_options.")
    yield from _unknown(content.get("grpc_options"), gRPCOptionsSchema, "grpc_options.")
    for i, application in enumerate(_items(content.get("applications"))):
        yield from _unknown(application, ServeApplicationSchema, f"applications.{i}.")
        deployments = application.get("deployments") if isinstance(application, dict) else None
        for j, deployment in enumerate(_items(deployments)):
            yield from _unknown(deployment, DeploymentSchema, f"applications.{i}.deployments.{j}.")


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _unknown(value: Any, schema: type[BaseModel], prefix: str) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (f"{prefix}{key}" for key in value if key not in schema.model_fields)


def _set(args: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {override}: must be key=value, as decode.scheme=bf16")
    *parents, last = key.split(".")
    section = args
    for parent in parents:
        section = section.setdefault(parent, {})
        if not isinstance(section, dict):
            raise ConfigError(f"{key}: {parent} is not a section", param=key)
    try:
        section[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}: not a YAML value: {text!r}", param=key) from error
