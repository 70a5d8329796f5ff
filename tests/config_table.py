"""The README's table of configuration keys, made from the descriptions in `cluster/config.py`.

`python -m tests.config_table --write` brings the README up to date; `tests/test_readme.py` compares.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cluster.config import BatonConfig

README: Final = Path(__file__).parent.parent / "README.md"
_BETWEEN_MARKS: Final = re.compile(r"(<!-- keys: .*? -->\n).*?(<!-- end of keys -->)", re.DOTALL)
_UNITS: Final = ((2**30, "GiB"), (2**20, "MiB"))


def config_table() -> str:
    """A Markdown table: every dotted key, its default and what it means. The pools have the same keys, so they share rows."""
    rows = [f"| `{key}` | {default} | {meaning} |" for key, default, meaning in _rows(BatonConfig, "")]
    return "\n".join(["| Key | Default | Meaning |", "|---|---|---|", *rows, ""])


def with_table(readme: str) -> str:
    """`readme` with the table between its two marks made anew."""
    return _BETWEEN_MARKS.sub(lambda match: match[1] + config_table() + match[2], readme)


def _rows(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in section.model_fields.items():
        if name == "decode":
            continue  # the same keys as `prefill`
        if isinstance(field.default, BaseModel):
            yield from _rows(type(field.default), "*pool*." if name == "prefill" else f"{name}.")
        else:
            yield prefix + name, _default(field), field.description or ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.default
    if isinstance(value, tuple):
        return ", ".join(f"`{getattr(item, 'name', item)}`" for item in value) or "none"
    if isinstance(value, int) and not isinstance(value, bool):
        for size, unit in _UNITS:
            if value >= size and value % size == 0:
                return f"`{value // size}{unit}`"
    return f"`{'null' if value is None else str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    if "--write" in sys.argv:
        README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(config_table())
