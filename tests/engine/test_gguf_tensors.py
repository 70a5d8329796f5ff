"""The quick reader finds what the package's own finds."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from cluster.engine.gguf_tensors import GgufTensors
from tests.deploy.tiny_gguf import write_gguf


def test_it_reads_the_same_tensors(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tensors=("output.weight", "blk.0.attn_q.weight"))
    ours, theirs = GgufTensors(path), gguf.GGUFReader(path)
    assert [(t.name, t.data_offset, t.tensor_type) for t in ours.tensors] == [
        (t.name, t.data_offset, t.tensor_type) for t in theirs.tensors
    ]
    assert all(np.array_equal(a.data, b.data) for a, b in zip(ours.tensors, theirs.tensors, strict=True))
    assert list(ours.fields) == list(theirs.fields)
    for name in ("general.architecture", "llama.context_length", "llama.rope.freq_base", "tokenizer.chat_template"):
        assert ours.fields[name].contents() == theirs.fields[name].contents()


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:400])
    with pytest.raises((ValueError, IndexError)):
        GgufTensors(path)
