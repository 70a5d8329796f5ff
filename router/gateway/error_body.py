"""Errors in the OpenAI shape, as a status before the first byte or an event after it (promise P8)."""

from __future__ import annotations

import json
import math
from typing import Any

from fastapi.responses import JSONResponse

from cluster.errors import BatonError


def error_body(error: BatonError) -> dict[str, Any]:
    """The JSON object."""
    return {"error": {"message": error.message, "type": error.openai_type, "param": error.param, "code": error.code}}


def error_event(error: BatonError) -> str:
    """The data of an event in a stream that has begun."""
    return json.dumps(error_body(error))


def error_response(error: BatonError, status: int | None = None) -> JSONResponse:
    """Tells clients that retry by themselves (the openai package does on 408, 409, 429 and 5xx) whether that can help."""
    headers = {"x-should-retry": "true" if error.should_retry else "false"}
    if error.should_retry:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or 1.0)))
    return JSONResponse(error_body(error), status_code=status or error.http_status, headers=headers)
