"""Smoothing factors: the product stays the same in floats, int8 loses less, and a file that does not fit is refused by name."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.engine.row_kv_cache import RowKVCache
from cluster.engine.smoothing import LayerFactors, SmoothedWeights, Smoothing
from cluster.engine.weights import open_weights
from cluster.errors import ConfigError
from cluster.model_config import SMOOTHING_FILE, ModelConfig, checkpoint_fingerprint
from tests.engine.model_drive import ModelDrive, engine_config
from tests.tiny_models import FAMILIES, VOCAB_SIZE, tiny_model

PROMPT = tuple(torch.randint(3, VOCAB_SIZE, (70,), generator=torch.Generator().manual_seed(4)).tolist())


def random_smoothing(family: str) -> Smoothing:
    """Factors between 1/8 and 8."""
    config, generator = ModelConfig.load(tiny_model(family)), torch.Generator().manual_seed(6)

    def factors(size: int) -> torch.Tensor:
        return torch.exp2(6 * torch.rand(size, generator=generator) - 3)

    sizes = (config.hidden_size, config.hidden_size, config.intermediate_size)
    return Smoothing([LayerFactors(*map(factors, sizes)) for _ in range(config.num_layers)], factors(config.hidden_size))


@functools.cache
def logits(folder: Path, scheme: str, kernels: str) -> torch.Tensor:
    drive = ModelDrive(folder, engine_config(scheme, kernels=kernels))
    sequence = drive.sequence(PROMPT)
    found = drive.logits([sequence], [len(PROMPT)])
    assert found is not None
    return found


def with_factors(family: str, smoothing: Smoothing, folder: Path) -> Path:
    """The family's checkpoint with the factors beside it."""
    shutil.copytree(tiny_model(family), folder)
    smoothing.save(folder / SMOOTHING_FILE)
    return folder


def folded(family: str, smoothing: Smoothing, folder: Path) -> Path:
    """A checkpoint of the family that has the factors in its weights."""
    source = tiny_model(family)
    config = ModelConfig.load(source)
    weights = SmoothedWeights(open_weights(source, config), smoothing, config)
    names = {*load_file(source / "model.safetensors"), SmoothedWeights.lm_head}
    folder.mkdir()
    save_file({name: weights.get(name).contiguous() for name in names}, folder / "model.safetensors")
    raw = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_folding_changes_no_product(family: str, tmp_path: Path) -> None:
    plain = logits(tiny_model(family), "float32", "reference")
    smoothed = logits(folded(family, random_smoothing(family), tmp_path / "folded"), "float32", "reference")
    assert torch.allclose(smoothed, plain, atol=1e-4)


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_int8_computes_the_folded_model(family: str, kernels: str, tmp_path: Path) -> None:
    """To the bit: what stands in the file is all that smoothing changes."""
    smoothing = random_smoothing(family)
    smoothed = logits(with_factors(family, smoothing, tmp_path / "smoothed"), "int8", kernels)
    assert torch.equal(smoothed, logits(folded(family, smoothing, tmp_path / "folded"), "int8", kernels))
    assert not torch.equal(smoothed, logits(tiny_model(family), "int8", kernels))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kv_is_what_other_schemes_compute(family: str, tmp_path: Path) -> None:
    """Else a decode worker of another scheme would read it with an output projection that has no factors."""
    folder = with_factors(family, random_smoothing(family), tmp_path / "smoothed")
    contents = []
    for scheme in ("bf16", "int8"):
        drive = ModelDrive(folder, engine_config(scheme, kernels="reference"))
        drive.logits([drive.sequence(PROMPT)], [len(PROMPT)])
        assert isinstance(drive.cache, RowKVCache)
        contents.append(torch.stack([drive.cache.layer_keys(0), drive.cache.layer_values(0)]).float())
    bf16, int8 = contents
    assert bf16.any()
    errors = (int8 - bf16).flatten(1).norm(dim=1) / bf16.flatten(1).norm(dim=1)
    assert float(errors.max()) < 0.25, "what int8 rounds with such factors; values divided by theirs would be off by more than their size"


@pytest.mark.parametrize("scheme", ["bf16", "int4"])
def test_other_schemes_stay_as_they_are(scheme: str, tmp_path: Path) -> None:
    folder = with_factors("llama", random_smoothing("llama"), tmp_path / "smoothed")
    assert torch.equal(logits(folder, scheme, "native"), logits(tiny_model("llama"), scheme, "native"))


def test_domain_and_checkpoint_name_the_factors(tmp_path: Path) -> None:
    smoothing = random_smoothing("llama")
    folder = with_factors("llama", smoothing, tmp_path / "one")
    plain, one = (ModelDrive(path, engine_config("int8")).built for path in (tiny_model("llama"), folder))
    assert one.domain != plain.domain
    assert one.domain.startswith("int8-smoothed/")
    other = with_factors(
        "llama", dataclasses.replace(smoothing, head=smoothing.head.nextafter(torch.tensor(torch.inf))), tmp_path / "other"
    )
    assert len({plain.checkpoint, one.checkpoint, checkpoint_fingerprint(other)}) == 3
    assert checkpoint_fingerprint(with_factors("llama", smoothing, tmp_path / "same")) == one.checkpoint


def test_a_folder_without_factors_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ModelDrive(tiny_model("llama"), engine_config("bf16"))
        assert SMOOTHING_FILE not in caplog.text
        ModelDrive(tiny_model("llama"), engine_config("int8"))
    assert caplog.text.count(SMOOTHING_FILE) == 1


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelDrive(folder, engine_config("int8"))
    assert caught.value.param == "model"
    assert str(folder / SMOOTHING_FILE) in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("length", [0, 5, 100, -1])
def test_a_truncated_file_is_refused_by_name(length: int, tmp_path: Path) -> None:
    folder = with_factors("llama", random_smoothing("llama"), tmp_path / "model")
    path = folder / SMOOTHING_FILE
    path.write_bytes(path.read_bytes()[:length])
    assert "is damaged" in refusal(folder)


def test_another_models_file_is_refused_by_name(tmp_path: Path) -> None:
    smoothing = random_smoothing("llama")
    other = dataclasses.replace(smoothing, head=smoothing.head[:80])
    assert "[80] for head, the model wants torch.float32 [96]" in refusal(with_factors("llama", other, tmp_path / "model"))


def test_too_few_or_impossible_factors_are_refused_by_name(tmp_path: Path) -> None:
    smoothing = random_smoothing("llama")
    fewer = dataclasses.replace(smoothing, layers=smoothing.layers[:-1])
    assert "lacks factors layers.2.qkv" in refusal(with_factors("llama", fewer, tmp_path / "fewer"))
    more = dataclasses.replace(smoothing, layers=[*smoothing.layers, random_smoothing("llama").layers[0]])
    assert "has factors layers.3.down" in refusal(with_factors("llama", more, tmp_path / "more"))
    zero = dataclasses.replace(smoothing, head=smoothing.head * 0)
    assert "factors for head that are not positive" in refusal(with_factors("llama", zero, tmp_path / "zero"))
