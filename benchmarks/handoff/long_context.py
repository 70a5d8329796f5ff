"""A model of the same shape and weights that takes longer prompts. What it says beyond its own context is worth nothing; its speed is."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def long_context(folder: Path, num_tokens: int) -> Iterator[tuple[Path, int | None]]:
    """`folder` itself where its model takes `num_tokens`, and None; otherwise one with links to its files whose model is said to, and the
    model's own limit. It is there as long as the context."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    own = int(config["max_position_embeddings"])
    if own >= num_tokens:
        yield folder, None
        return
    with tempfile.TemporaryDirectory(prefix="baton-long-") as parent:
        longer = Path(parent) / folder.name
        longer.mkdir()
        for file in folder.iterdir():
            if file.is_file() and file.name != "config.json":
                (longer / file.name).symlink_to(file.resolve())
        (longer / "config.json").write_text(json.dumps({**config, "max_position_embeddings": num_tokens}), encoding="utf-8")
        yield longer, own
