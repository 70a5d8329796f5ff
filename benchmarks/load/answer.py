"""What came back for one request, as it comes: a transport writes here, with the time at which the bytes were read."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.load.trace import Chunk


class LoadError(Exception):
    """A request that failed. `kind` is short and the same for the same cause; errors are counted by it.

    Kinds: `http_<status>`, `grpc_<STATUS>`, `connect` (no connection), `dropped` (the connection ended inside the answer), `timeout`,
    `error_event` (an error inside the stream), `unfinished` (the stream ended without a finish reason), `malformed` (not the protocol),
    `interrupted` (the load generator itself was stopped).
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True)
class Answer:
    """One answer while it arrives. Transports say `time.perf_counter()`; kept are seconds after `started_s`, the start of the run."""

    started_s: float
    chunks: list[Chunk] = field(default_factory=list)
    finished_s: float | None = None
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None

    def add_chunk(self, now_s: float, num_chars: int, num_tokens: int | None = None) -> None:
        """Something for the reader arrived; `num_tokens` where the protocol says it."""
        self.chunks.append(Chunk(now_s - self.started_s, num_chars, num_tokens))

    def finish(self, now_s: float) -> None:
        """The finish reason arrived."""
        self.finished_s = now_s - self.started_s

    def set_usage(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """The server's own count."""
        self.num_prompt_tokens, self.num_output_tokens = num_prompt_tokens, num_output_tokens
