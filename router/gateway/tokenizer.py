"""Text ↔ token ids, once per request, in the gateway alone.

Uses the `tokenizers` library directly: importing transformers would pull torch into every gateway.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer as RawTokenizer

from cluster.errors import ConfigError, InvalidRequest
from router.gateway.chat_template import ChatTemplate
from router.gateway.detokenizer import Detokenizer
from router.gateway.token_bytes import TokenBytes

_INLINE_CHARS: Final = 16_384  # longer texts are encoded in a thread (the call releases the GIL), off the event loop
_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """One model's tokenizer and chat template."""

    def __init__(self, raw: RawTokenizer, settings: Mapping[str, Any], template: str | None) -> None:
        """
        Args:
            raw: of `tokenizer.json`.
            settings: of `tokenizer_config.json`.
            template: the chat template's text; None for a model without one.

        Raises:
            ConfigError: the decoder or the template cannot be used.
        """
        self._raw = raw
        raw.no_truncation()
        raw.no_padding()
        special = {name: text for name in _SPECIAL_TOKENS if (text := _token_text(settings.get(name))) is not None}
        self._template = None if template is None else ChatTemplate(template, special)
        self.token_bytes = TokenBytes(raw)

    @staticmethod
    def load(folder: Path) -> Tokenizer:
        """Reads `tokenizer.json`, `tokenizer_config.json` and, where there is one, `chat_template.jinja`.

        Raises:
            ConfigError: a file is missing or cannot be used.
        """
        try:
            raw = RawTokenizer.from_str((folder / "tokenizer.json").read_text())
            settings_path = folder / "tokenizer_config.json"
            settings: dict[str, Any] = json.loads(settings_path.read_text()) if settings_path.exists() else {}
            template_path = folder / "chat_template.jinja"
            template = template_path.read_text() if template_path.exists() else _template_of(settings)
        except OSError as error:
            raise ConfigError(f"model: cannot read the tokenizer: {error}", param="model") from error
        except Exception as error:  # the library raises plain Exception for a file that it does not understand
            raise ConfigError(f"model: the tokenizer's files are broken: {error}", param="model") from error
        return Tokenizer(raw, settings, template)

    async def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a completion's prompt, with the special tokens that `tokenizer.json` puts around a text (as in transformers, what
        `tokenizer_config.json` says of them does not count beside it)."""
        return await self._encode(text, add_special_tokens=True)

    async def encode_chat(self, messages: Sequence[Mapping[str, str]], extra: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of a chat; the template writes the special tokens itself.

        Raises:
            InvalidRequest: the model has no template, or its template refuses the messages.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        return await self._encode(self._template.render(messages, extra), add_special_tokens=False)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh one, for one sequence."""
        return Detokenizer(self.token_bytes, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token's own text, U+FFFD where it is no whole character."""
        return self.token_bytes[token_id].decode(errors="replace")

    async def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) <= _INLINE_CHARS:
            return self._encode_now(text, add_special_tokens)
        return await asyncio.to_thread(self._encode_now, text, add_special_tokens)

    def _encode_now(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids


def _token_text(value: Any) -> str | None:
    """A special token is stored as its text, or as an object that holds it."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template_of(settings: Mapping[str, Any]) -> str | None:
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default")
    return template if isinstance(template, str) else None
