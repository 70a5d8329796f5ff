"""The engine for asyncio: it steps in a thread of its own, off the event loop, and commands run between its steps.

    any thread: post a command ──► [engine's thread: commands, then one step if there is work, else sleep] ──► streams

A command that ends a sequence also ends a step that is mostly for that one (`Engine.disown`), so it does not wait for a long chunk.

A stream hears of its allocation before the step that computes its first chunk, and of what a step did once, after it.

A step whose model call fails ends its own sequences with `Failed`, and the engine goes on. Anything else that raises in the thread is a
bug or a dead device: the loop is *broken*, every stream ends with InternalError, and the worker's health check says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from cluster.engine.engine import Engine, Events, Reservation
from cluster.engine.event_stream import EventStream
from cluster.engine.events import EngineEvent
from cluster.engine.load import EngineLoad
from cluster.errors import BatonError, ClientGone, Draining, InternalError
from cluster.types import Request, TokenOutput

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


def _ignore(refusal: BatonError) -> None:
    """For commands that have nothing to end once the engine has stopped."""


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[Engine], object]  # in the engine's thread
    refuse: Callable[[BatonError], object] = _ignore  # instead, when the engine takes no more commands


class EngineLoop:
    """One engine and its thread. Start it once; after `stop` it refuses everything with `Draining`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._changed = threading.Condition()
        self._commands: deque[_Command] = deque()
        self._refusal: BatonError | None = None  # why no command is taken any more
        self._streams: dict[str, EventStream] = {}  # by request key; the engine's thread alone touches it
        self._load = engine.load()
        self._busy_since_s: float | None = None

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread after its present step; streams still open end with `Draining`. Idempotent."""
        self._close(Draining("the engine has stopped"))
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    # ---- sequences -----------------------------------------------------------------------------------------------------

    def generate(self, request: Request) -> EventStream:
        """Prefill and decode here: Allocated, Computed*, Token*. The first read raises what `Engine.add` does."""
        return self._stream(request.key, lambda engine: engine.add(request, stop_after_first_token=False))

    def prefill(self, request: Request) -> EventStream:
        """Prefill here: Allocated, Computed*, Token. Then the blocks are leased until `release_lease`, unless it has a finish reason."""
        return self._stream(request.key, lambda engine: engine.add(request, stop_after_first_token=True), ends_at_first_token=True)

    async def reserve(self, request: Request, ticket_domain: str, num_tokens: int) -> Reservation | None:
        """Blocks for KV from elsewhere; None when there is no room now. Ends with `decode` or `abort`; cancelled, it reserves nothing.

        Raises:
            InvalidRequest, ContextTooLong: as `Engine.reserve`.
        """
        taken: list[Reservation] = []

        def reserve(engine: Engine) -> Reservation | None:
            reservation = engine.reserve(request, ticket_domain, num_tokens)
            if reservation is not None:
                taken.append(reservation)
            return reservation

        try:
            return await self.run(reserve)
        except asyncio.CancelledError:
            self._post(_Command(lambda engine: engine.abort(taken[0].key) if taken else None))
            raise

    def decode(self, reservation: Reservation, first_token: TokenOutput) -> EventStream:
        """Decode from the second token on, once the KV is in the reserved blocks: Token*. Reading raises what `Engine.start` does."""
        return self._stream(reservation.key, lambda engine: engine.start(reservation.key, first_token))

    def abort(self, key: str) -> None:
        """Ends a sequence or lease in any state; its stream's reader gets `ClientGone`. Any thread, idempotent."""
        self._post_end(key, lambda engine: self._abort(engine, key))

    def release_lease(self, key: str) -> None:
        """Frees leased blocks. Any thread, idempotent."""
        self._post(_Command(lambda engine: engine.release_lease(key)))

    async def run(self, function: Callable[[Engine], T]) -> T:
        """What `function` returns or raises, called between two steps."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(set_outcome: Callable[[], None]) -> None:
            if not future.done():
                set_outcome()

        def send(set_outcome: Callable[[], None]) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody waits
                loop.call_soon_threadsafe(settle, set_outcome)

        def call(engine: Engine) -> None:
            try:
                result = function(engine)
                self._load = engine.load()  # who waits for the result sees its effect
            except Exception as error:
                send(lambda error=error: future.set_exception(error))  # type: ignore[misc]
            else:
                send(lambda: future.set_result(result))

        self._post(_Command(call, lambda refusal: send(lambda: future.set_exception(refusal))))
        return await future

    # ---- state, from any thread ----------------------------------------------------------------------------------------

    def load(self) -> EngineLoad:
        """The engine's load after its last step or commands."""
        return self._load

    @property
    def num_streams(self) -> int:
        """Streams of submitted sequences that have not ended."""
        return len(self._streams)

    @property
    def broken(self) -> str | None:
        """Why the engine cannot go on; None while it can."""
        return self._refusal.message if isinstance(self._refusal, InternalError) else None

    def seconds_since_progress(self) -> float:
        """How long the present step has been running; 0 when idle."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    # ---- posting -------------------------------------------------------------------------------------------------------

    def _stream(self, key: str, submit: Callable[[Engine], None], *, ends_at_first_token: bool = False) -> EventStream:
        def leave(stream: EventStream) -> None:
            self._post_end(key, lambda engine: self._leave(engine, key, stream))

        def run(engine: Engine) -> None:
            try:
                submit(engine)
            except BatonError as error:
                stream.fail(error)
            except Exception as error:  # breaks the loop, which does not know the stream yet
                stream.fail(InternalError(f"the engine is broken: {error!r}"))
                raise
            else:
                stream.is_submitted = True
                self._streams[key] = stream

        stream = EventStream(leave, ends_at_first_token=ends_at_first_token)
        self._post(_Command(run, stream.fail))
        return stream

    def _post(self, command: _Command) -> None:
        with self._changed:
            refusal = self._refusal
            if refusal is None:
                self._commands.append(command)
                self._changed.notify()
        if refusal is not None:
            command.refuse(refusal)

    def _post_end(self, key: str, run: Callable[[Engine], object]) -> None:
        """`run` ends the sequence `key`."""
        self._post(_Command(run))
        self._engine.disown(key)  # after posting: a step that ends early finds the command, and does not begin anew with the sequence

    def _close(self, refusal: BatonError) -> None:
        with self._changed:
            if self._refusal is None:
                self._refusal = refusal
            self._changed.notify()

    # ---- the engine's thread -------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while self._wait():
                self._turn()
        except Exception as error:
            _LOG.critical("the engine is broken", exc_info=error)
            self._close(InternalError(f"the engine is broken: {error!r}"))
        self._busy_since_s = None
        assert self._refusal is not None
        for command in self._commands:  # `_post` adds none any more
            command.refuse(self._refusal)
        for stream in self._streams.values():
            stream.fail(self._refusal)

    def _wait(self) -> bool:
        """Sleeps until there is something to do; False when it is time to end."""
        with self._changed:
            while self._refusal is None and not self._commands and not self._engine.has_work:
                self._busy_since_s = None
                self._changed.wait()
            return self._refusal is None

    def _turn(self) -> None:
        self._busy_since_s = time.monotonic()
        for _ in range(len(self._commands)):
            self._commands.popleft().run(self._engine)
        events = self._engine.step(self._announce) if self._engine.has_work else []
        self._load = self._engine.load()
        self._deliver(events)

    def _announce(self, events: Events) -> None:
        """Within a step, whose sequences nobody may end now: a reader that is gone is found out by `_deliver`."""
        for key, event in events:
            if (stream := self._streams.get(key)) is not None:
                stream.deliver([event])

    def _deliver(self, events: Events) -> None:
        by_key: defaultdict[str, list[EngineEvent]] = defaultdict(list)
        for key, event in events:
            by_key[key].append(event)
        for key, own in by_key.items():
            stream = self._streams.get(key)
            if stream is None:
                continue
            if not stream.deliver(own):
                self._leave(self._engine, key, stream)
            elif stream.is_last(own[-1]):
                del self._streams[key]

    def _leave(self, engine: Engine, key: str, stream: EventStream) -> None:
        """The reader is gone. A stream that was refused, or whose key has another stream by now, ends nothing."""
        if stream.is_submitted and self._streams.get(key, stream) is stream:
            self._streams.pop(key, None)
            engine.abort(key)

    def _abort(self, engine: Engine, key: str) -> None:
        stream = self._streams.pop(key, None)
        if stream is not None:
            stream.fail(ClientGone(f"{key} was aborted"))
        engine.abort(key)
