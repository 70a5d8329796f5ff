"""How a runner speaks: one line of JSON when it is ready, then an answer for each case that comes in. Standard library alone.

    → {"prompts": [[17, 4, …], …], "max_tokens": 128}
    ← {"duration_s": 3.2, "num_tokens": [128, …]}      or {"error": "…"}

The duration is that of the library's own call: the model is loaded, and nothing is parsed, within it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

TokenIds = list[list[int]]
Generate = Callable[[TokenIds, int], Sequence[int]]  # prompts, and output tokens of each; how many each got


def serve(load: Callable[[], tuple[Generate, dict[str, Any]]]) -> None:
    """Loads, says so with the settings that `load` gives beside the call, and answers until the input ends.

    What libraries print goes to stderr: stdout holds answers alone.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        generate, settings = load()
    except Exception as error:  # whatever a peer's library raises is the reason why it has no figures
        _say(answers, {"error": _reason(error)})
        return
    _say(answers, {"ready": settings})
    for line in sys.stdin:
        case = json.loads(line)
        try:
            _say(answers, _timed(generate, case["prompts"], case["max_tokens"]))
        except Exception as error:
            _say(answers, {"error": _reason(error)})


def _timed(generate: Generate, prompts: TokenIds, max_tokens: int) -> dict[str, Any]:
    started_s = time.perf_counter()
    num_tokens = generate(prompts, max_tokens)
    return {"duration_s": time.perf_counter() - started_s, "num_tokens": list(num_tokens)}


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _say(answers: Any, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()
