"""The README says what the repository does: its table, its paths, its commands, its snippets."""

from __future__ import annotations

import ast
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from cluster.config import BatonConfig
from cluster.faults.points import FaultPoint
from tests.config_table import README, config_table, with_table

ROOT = README.parent
TEXT = README.read_text(encoding="utf-8")
PATHS = sorted(set(re.findall(r"[`(]((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:md|toml|yaml))[`)]", TEXT)))
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.DOTALL)


def test_configuration_table_is_in_step_with_the_config() -> None:
    assert with_table(TEXT) == TEXT, "run `python -m tests.config_table --write`"


def test_configuration_table_describes_every_key() -> None:
    assert not [line for line in config_table().splitlines() if line.endswith("|  |")]


def test_every_fault_point_is_told_with_its_actions() -> None:
    rows = dict(re.findall(r"(?m)^\| `([\w.]+)` \| \w+ worker, [^|]+ \| ([\w, ]+) \|$", TEXT))
    assert {point: set(actions.split(", ")) for point, actions in rows.items()} == {str(p): set(map(str, p.actions)) for p in FaultPoint}


@pytest.mark.parametrize("path", PATHS)
def test_path_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_paths_are_found_at_all() -> None:
    assert len(PATHS) > 20
    assert "deploy/local.yaml" in PATHS


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?m)(?:`|^)make ([a-z-]+)", TEXT))))
def test_make_target_exists(target: str) -> None:
    assert re.search(rf"(?m)^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"))


@pytest.mark.parametrize("module", sorted(set(re.findall(r"python -m ([\w.]+)", TEXT))))
def test_module_exists(module: str) -> None:
    assert find_spec(module) is not None


@pytest.mark.parametrize("key", sorted(set(re.findall(r"--set ([\w.]+)=", TEXT))))
def test_override_names_a_key(key: str) -> None:
    section = BatonConfig.model_fields
    *parents, last = key.split(".")
    for parent in parents:
        section = type(section[parent].default).model_fields
    assert last in section


def test_python_snippets_parse() -> None:
    snippets = [code for language, code in BLOCKS if language == "python"]
    assert snippets
    for code in snippets:
        ast.parse(code)


def test_curl_sends_json() -> None:
    bodies = [body for language, code in BLOCKS if language == "sh" for body in re.findall(r"-d '(.*?)'", code)]
    assert bodies
    assert all("model" in json.loads(body) for body in bodies)


def test_no_file_of_this_machine_is_named() -> None:
    assert str(Path.home()) not in TEXT
