"""Makes the smoothing factors of a model in the cache: scheme `int8` loses a fraction of its quality with them.

They are made once, from a text that comes with Baton, and kept in the model's folder; whoever copies the folder has them too. Folders
outside of the cache belong to others and stay as they are: `int8` serves them without factors and says so in the worker's log.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from cluster.cache import cache_folder
from cluster.errors import ConfigError
from cluster.model_config import SMOOTHING_FILE
from deploy.model_cache import Report

TEXT: Final = Path(__file__).parent / "data" / "calibration.txt"
_NUM_TOKENS: Final = 1024
_REPORT_INTERVAL_S: Final = 5.0


def calibrate_cached(folder: Path, report: Report = lambda line: None) -> None:
    """Makes the factors of a model in Baton's cache that has none yet: seconds for small models, minutes for large ones.

    Whatever the scheme: the file counts in the checkpoint, so one that came later would make workers that start again strangers to those
    that run.

    Raises:
        ConfigError: for `model`: its files cannot be read, or the cache cannot be written.
    """
    path = folder / SMOOTHING_FILE
    if path.exists() or cache_folder().resolve() not in folder.resolve().parents:
        return
    from cluster.engine.calibration import calibrate  # imports torch, which takes seconds

    report(f"calibrating int8 on {_NUM_TOKENS} tokens")
    smoothing = calibrate(folder, _token_ids(folder), _sayer(report))
    try:
        with tempfile.TemporaryDirectory(prefix=".smoothing-", dir=folder) as partial:
            smoothing.save(Path(partial) / SMOOTHING_FILE)
            (Path(partial) / SMOOTHING_FILE).replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}", param="model") from error


def _token_ids(folder: Path) -> list[int]:
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more special
        raise ConfigError(f"cannot read {path}: {error}", param="model") from error
    return list(tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids[:_NUM_TOKENS])


def _sayer(report: Report) -> Callable[[int, int], None]:
    said_s = time.monotonic()

    def say(done: int, total: int) -> None:
        nonlocal said_s
        if time.monotonic() - said_s > _REPORT_INTERVAL_S:
            said_s = time.monotonic()
            report(f"{done} of {total} layers")

    return say
