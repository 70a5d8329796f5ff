"""Which servers take part, from the options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.comparison.servers import Cluster, Start, baton, vllm
from benchmarks.report import progress
from cluster.errors import ConfigError
from deploy.config_file import load_serve_file
from deploy.pull import resolve_model


@dataclass(frozen=True, slots=True)
class ServerChoice:
    """Baton in some settings, and the peers that serve, by the names under which their figures appear."""

    starts: dict[str, Start]
    peers: list[str]
    settings: dict[str, Any]  # what the line of JSON says of them

    @property
    def names(self) -> list[str]:
        return list(self.starts)


def server_choice(options: argparse.Namespace, clusters: Sequence[Cluster]) -> ServerChoice:
    """
    Args:
        clusters: the part's own settings of Baton, unless the options name others.

    Raises:
        ConfigError: the config or the model is wrong, or a peer has no server.
    """
    model = options.model or load_serve_file(options.config).config.model
    folder = resolve_model(model, progress)
    peers = ["vllm"] if options.peers is None else options.peers
    if unserved := [name for name in peers if name != "vllm"]:
        raise ConfigError(f"--peers {unserved[0]}: only vllm is compared as a server", param="--peers")
    chosen = {f"baton {cluster.name}": cluster for cluster in options.cluster or clusters}
    starts = {name: baton(cluster, options.config, model, options.port) for name, cluster in chosen.items()}
    starts |= {name: vllm(folder, options.threads, options.dtype, options.port) for name in peers}
    settings = {
        "model": model,
        "threads": options.threads,
        "dtype": options.dtype,
        "clusters": {name: cluster.overrides for name, cluster in chosen.items()},
    }
    return ServerChoice(starts, peers, settings)
