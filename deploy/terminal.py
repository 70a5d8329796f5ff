"""Text attributes, where the reader is a terminal that takes them."""

from __future__ import annotations

import os
from typing import Final, TextIO

# Tab and newline stay. A model's text may hold any character, and an escape sequence could do more to a terminal than write.
_CONTROLS: Final = {code: "�" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


def has_attributes(stream: TextIO) -> bool:
    """Whether `stream` shows attributes: a terminal, and neither `NO_COLOR` nor a dumb one."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def dim(text: str, stream: TextIO) -> str:
    """`text`, dimmed for `stream`."""
    return f"\x1b[2m{text}\x1b[0m" if has_attributes(stream) else text


def printable(text: str, stream: TextIO) -> str:
    """`text` without what a terminal would obey; as it is where `stream` is no terminal."""
    return text.translate(_CONTROLS) if stream.isatty() else text
