"""Why a model did not come from a hub, in one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import httpx2
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from cluster.errors import ConfigError

_REASONS: Final[Mapping[type[Exception], str]] = {  # the first that fits
    GatedRepoError: "{hub} gives it only to those who accepted its terms there: do so, then set HF_TOKEN",
    RepositoryNotFoundError: "{hub} has no such model, or shows it to others only: then set HF_TOKEN",
    RevisionNotFoundError: "it has no such revision on {hub}",
    OfflineModeIsEnabled: "it is not in the cache, and HF_HUB_OFFLINE forbids to ask for it",
    HFValidationError: "no valid id: {said}",
    HfHubHTTPError: "{hub} failed: {said}",
    httpx2.HTTPError: "{hub} cannot be reached: {said}",
    httpx2.InvalidURL: "{hub} (HF_ENDPOINT) is no URL: {said}",
    Exception: "{said}",
}

_RAISED: Final = (HfHubHTTPError, OfflineModeIsEnabled, HFValidationError, httpx2.HTTPError, httpx2.InvalidURL, LocalEntryNotFoundError)


def refused(name: str, reason: str) -> ConfigError:
    """The error for the hub id `name`."""
    return ConfigError(f"model: {name!r} is no folder here, and as a hub id: {reason}", param="model")


@contextmanager
def explaining(name: str, hub: str) -> Iterator[None]:
    """Turns what `huggingface_hub` raises while it asks `hub` for the id `name` into a ConfigError."""
    try:
        yield
    except _RAISED as error:
        raise refused(name, _reason(error, hub)) from error
    except OSError as error:
        if error.errno is not None:  # of this machine
            raise
        raise refused(name, f"the download did not come whole: {_first_line(error)}") from error


def _reason(error: BaseException, hub: str) -> str:
    cause = error.__cause__
    if isinstance(error, LocalEntryNotFoundError) and cause is not None:
        return _reason(cause, hub)  # the library looks into its own cache before it says why
    reason = next(text for kind, text in _REASONS.items() if isinstance(error, kind))
    return reason.format(hub=hub, said=_first_line(error) or type(error).__name__)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
