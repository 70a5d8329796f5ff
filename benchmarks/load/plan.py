"""What the options ask for, checked against each other before anything is sent."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, urlsplit

from benchmarks.load.arrivals import Bursts, Poisson
from benchmarks.load.driver import Budget, ClosedLoop, OpenLoop, Pace
from benchmarks.load.grpc import GrpcTarget, GrpcTransport, fields_of_body
from benchmarks.load.http import HttpTarget, HttpTransport
from benchmarks.load.requests import RandomTokens, RandomWords, RecordedRequests, RequestSource, read_requests
from benchmarks.load.slo import Slo, parse_slo
from benchmarks.load.transport import Transport
from cluster.errors import ConfigError

_DEFAULT_CONCURRENCY: Final = 4
_DEFAULT_REQUESTS: Final = 100


@dataclass(frozen=True, slots=True)
class Plan:
    """One benchmark. With `search`, `rate` is the first one tried."""

    source: RequestSource
    budget: Budget
    rate: float | None  # open loop, requests/s; None: closed loop
    burst: int
    concurrency: int
    seed: int
    num_warm_up: int
    slo: Slo | None
    search: bool
    attain: float
    precision: float
    progress_interval_s: float

    def pace(self, rate: float | None) -> Pace:
        """Of one run; in an open loop at `rate`."""
        if rate is None:
            return ClosedLoop(self.concurrency)
        return OpenLoop(Bursts(rate, self.burst) if self.burst > 1 else Poisson(rate), self.seed)


def plan_of(options: argparse.Namespace) -> Plan:
    """Raises:
    ConfigError: options that contradict each other, or a dataset that cannot be used.
    """
    source = _source(options)
    slo = _slo(options)
    if options.burst > 1 and options.rate is None and not options.search:
        raise ConfigError("--burst needs --rate: a closed loop has no bursts", param="--burst")
    if options.search and options.concurrency:
        raise ConfigError("--search looks for a rate: it goes with --rate, not with --concurrency", param="--search")
    return Plan(
        source=source,
        budget=_budget(options, source),
        rate=options.rate or (1.0 if options.search else None),
        burst=options.burst,
        concurrency=options.concurrency or _DEFAULT_CONCURRENCY,
        seed=options.seed,
        num_warm_up=options.warm_up,
        slo=slo,
        search=options.search,
        attain=options.attain,
        precision=options.precision,
        progress_interval_s=options.progress_interval,
    )


def transport_of(options: argparse.Namespace) -> Transport:
    """The protocol that the URL's scheme names. The API key comes from the environment, so that no published command line holds it.

    Raises:
        ConfigError: no protocol has this scheme, or the protocol cannot do what the options ask for.
    """
    parts = urlsplit(options.url)
    if parts.scheme == "grpc":
        return GrpcTransport(_grpc_target(options, parts))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{options.url}: expected http://HOST:PORT, https://HOST:PORT or grpc://HOST:PORT", param="url")
    target = HttpTarget(
        url=options.url,
        api=options.api,
        ignore_eos=not options.stop_at_eos,
        timeout_s=options.timeout,
        extra_body=options.body,
        api_key=os.environ.get("OPENAI_API_KEY") or None,
    )
    return HttpTransport(target)


def _grpc_target(options: argparse.Namespace, parts: SplitResult) -> GrpcTarget:
    if not parts.hostname or not _has_port(parts) or parts.username is not None or parts.path.strip("/") or parts.query:
        raise ConfigError(f"{options.url}: expected grpc://HOST:PORT", param="url")
    if options.api == "chat":
        raise ConfigError("--api chat: Baton's gRPC API has no chats; they go to its HTTP port", param="--api")
    return GrpcTarget(parts.netloc, not options.stop_at_eos, options.timeout, fields_of_body(options.body))


def _has_port(parts: SplitResult) -> bool:
    try:
        return bool(parts.port)
    except ValueError:
        return False


def _source(options: argparse.Namespace) -> RequestSource:
    chat = options.api == "chat"
    if options.dataset is not None:
        return _recorded(options.dataset, chat)
    if options.text or chat:
        return RandomWords(options.input_tokens, options.output_tokens)
    return RandomTokens(options.input_tokens, options.output_tokens, options.vocab_size)


def _recorded(path: Path, chat: bool) -> RecordedRequests:
    source = read_requests(path)
    if chat and not all(isinstance(request.prompt, str) for request in source.recorded):
        raise ConfigError(f"{path} has prompts of token ids, which a chat cannot take", param="--dataset")
    return source


def _slo(options: argparse.Namespace) -> Slo | None:
    try:
        slo = parse_slo(options.slo)
    except ValueError as error:
        raise ConfigError(f"--slo {error}", param="--slo") from error
    if options.search and slo is None:
        raise ConfigError("--search needs an SLO to attain, as --slo ttft=2.0", param="--slo")
    return slo


def _budget(options: argparse.Namespace, source: RequestSource) -> Budget:
    if options.requests is not None:
        num_requests = options.requests
    elif options.duration is not None:
        num_requests = 2**62  # the duration alone ends the run
    else:
        num_requests = len(source.recorded) if isinstance(source, RecordedRequests) else _DEFAULT_REQUESTS
    return Budget(num_requests, float("inf") if options.duration is None else options.duration)
