"""`baton chat`: a conversation in the terminal with any OpenAI server, or one answer in a pipe.

Answers go to stdout; figures and errors to stderr, so that a pipe gets the answer alone.
"""

from __future__ import annotations

import argparse
import re
import sys
from contextlib import suppress
from typing import Final

from cluster.errors import ConfigError
from deploy.conversation import Conversation
from deploy.openai_client import DEFAULT_URL, OpenAIServer, ServerError
from deploy.terminal import dim, has_attributes, printable

_URL: Final = re.compile(r"\w+://\S*|[\w.-]+:\d+(/\S*)?")
_FIELDS: Final = ("temperature", "max_tokens", "seed")
_HELP: Final = """/reset         forget the conversation; the system message stays
/system TEXT   set the system message; without TEXT, none
/help          this
/quit          leave; so do Ctrl-D, and Ctrl-C at the prompt
Ctrl-C ends an answer; what came of it stays in the history.
Any other line is said to the model; start one that begins with / with a space."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """All options; their namespace goes to `chat`."""
    parser.add_argument("url", nargs="?", metavar="URL", help=f"of an OpenAI server (default: {DEFAULT_URL})")
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="answer this and exit; without a terminal, the prompt is all of stdin")
    parser.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: the server's)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="the longest answer (default: the server's)")
    parser.add_argument("--seed", type=int, metavar="N", help="the same answer again, where the server knows seeds")
    parser.add_argument("--no-timings", action="store_true", help="no line of figures after an answer")


def chat(options: argparse.Namespace) -> int:
    """Runs what `options` ask for; the exit code: 0 answered or left, 1 no answer, 130 an answer in a pipe was interrupted.

    Raises:
        ConfigError: the URL is none, or stdin has no prompt.
    """
    url, prompt = _url_and_prompt(options.url, options.prompt)
    server = OpenAIServer(url)
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read().rstrip("\r\n")  # the end of its last line is no part of it, as in a shell's $(…)
    if prompt is not None and not prompt.strip():
        raise ConfigError("PROMPT: is empty", param="prompt")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # half of a surrogate pair, or a terminal without UTF-8
    try:
        model = options.model or server.first_model()
    except ServerError as error:
        return _failed(error)
    fields = {name: value for name in _FIELDS if (value := getattr(options, name)) is not None}
    conversation = Conversation(server, model, fields, system=options.system, timings=not options.no_timings)
    session = ChatSession(conversation, shows_figures=not options.no_timings)
    if prompt is not None:
        return session.answer(prompt)
    _say(f"{model} at {server.url}. /help lists the commands, Ctrl-D leaves.")
    return session.run()


class ChatSession:
    """One conversation with the person at the terminal."""

    def __init__(self, conversation: Conversation, *, shows_figures: bool) -> None:
        self._conversation = conversation
        self._shows_figures = shows_figures

    def run(self) -> int:
        """Reads lines until the end; the exit code."""
        with suppress(ImportError):
            import readline  # noqa: F401  # editing and history for input()
        try:
            while True:
                line = input(_prompt())
                if line.strip() == "/quit":
                    return 0
                self._take(line)
        except (EOFError, KeyboardInterrupt):
            print()
            return 0

    def answer(self, prompt: str) -> int:
        """Streams one answer; the exit code."""
        output = _Output()
        try:
            reply = self._conversation.ask(prompt, output.write)
        except ServerError as error:
            output.end()
            return _failed(error)
        output.end()
        if self._shows_figures:
            _say(reply.summary())
        return 130 if reply.is_cancelled else 0

    def _take(self, line: str) -> None:
        command, _, rest = line.strip().partition(" ")
        if not line.startswith("/"):
            if command:
                self.answer(line.strip())
        elif command == "/reset":
            self._conversation.reset()
            _say("forgotten")
        elif command == "/system":
            self._conversation.system = rest.strip() or None
            _say("system message set" if rest.strip() else "no system message")
        elif command == "/help":
            _say(_HELP)
        else:
            _say(f"{command} is no command; /help lists them")


def _url_and_prompt(first: str | None, second: str | None) -> tuple[str, str | None]:
    """One argument may be either."""
    if first is not None and second is None and not _URL.fullmatch(first):
        return DEFAULT_URL, first
    return first or DEFAULT_URL, second


def _prompt() -> str:
    return "\x01\x1b[1m\x02> \x01\x1b[0m\x02" if has_attributes(sys.stdout) else "> "  # \x01 and \x02: readline does not count between them


class _Output:
    """One answer on stdout, ended by a newline if it had any text."""

    def __init__(self) -> None:
        self._last = "\n"

    def write(self, text: str) -> None:
        """Shows `text` at once."""
        print(printable(text, sys.stdout), end="", flush=True)
        self._last = text[-1]

    def end(self) -> None:
        """Ends the line."""
        if self._last != "\n":
            print(flush=True)


def _say(text: str) -> None:
    print(dim(text, sys.stderr), file=sys.stderr, flush=True)


def _failed(error: ServerError) -> int:
    print(f"baton: {error}", file=sys.stderr, flush=True)
    return 1
