"""Renders the messages of a chat into the prompt's text, as `transformers` does, without importing it.

The template comes with the model and is untrusted code: it runs in jinja2's immutable sandbox and sees only plain JSON values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.errors import ConfigError, InvalidRequest

RESERVED_NAMES: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class _Generation(Extension):
    """`{% generation %}` marks the assistant's tokens for training; when serving, its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012  # the name and type are jinja2's

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> str:
        return str(caller())


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    # jinja2's own filter escapes HTML characters.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One model's template, compiled once."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """
        Args:
            source: the jinja2 text.
            special_tokens: what the template may name, as `bos_token`.

        Raises:
            ConfigError: the template has a syntax error.
        """
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"model: the chat template does not compile: {error}", param="model") from error

    def render(self, messages: Sequence[Mapping[str, str]], extra: Mapping[str, Any] | None = None) -> str:
        """The prompt's text, ending where the assistant is to go on.

        Args:
            messages: `role`, `content` and what else the template may know.
            extra: the request's own variables; they win over the special tokens.

        Raises:
            InvalidRequest: the template refuses these messages.
        """
        variables = {**self._special_tokens, **(extra or {})}
        plain = [dict(message) for message in messages]
        try:
            return self._template.render(messages=plain, tools=None, documents=None, add_generation_prompt=True, **variables)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error.message}", param="messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, LookupError) as error:
            raise InvalidRequest(f"the model's chat template fails on these messages: {error}", param="messages") from error
