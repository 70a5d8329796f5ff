"""The error tree and its table."""

from __future__ import annotations

import re

import grpc
import pytest

from cluster import errors


def all_classes(root: type[errors.BatonError] = errors.BatonError) -> list[type[errors.BatonError]]:
    return [root, *(found for child in root.__subclasses__() for found in all_classes(child))]


CLASSES = all_classes()
# Bases that are never raised share their code with the class that stands for them.
ROWS = [cls for cls in CLASSES if cls not in (errors.BatonError, errors.RequestError)]


def test_the_drawing_is_the_tree() -> None:
    doc = errors.__doc__ or ""
    drawn = re.findall(r"^ *(?:[│├└─ ]*)(\b[A-Z]\w+)\b", doc.split("Errors cross")[0].split("\n\n", 1)[1], re.MULTILINE)
    assert sorted(drawn) == sorted(cls.__name__ for cls in CLASSES)


def test_statuses_in_the_drawing() -> None:
    drawn = dict(re.findall(r"(\w+) +(\d{3})\b", (errors.__doc__ or "").split("Errors cross")[0]))
    assert len(drawn) >= 10
    for name, status in drawn.items():
        assert getattr(errors, name).http_status == int(status)


@pytest.mark.parametrize("cls", ROWS)
def test_code_restores_the_class(cls: type[errors.BatonError]) -> None:
    error = errors.from_code(cls.code, "message", param="param", retry_after_s=2.5)
    assert type(error) is cls
    assert (error.message, error.param, error.retry_after_s, str(error)) == ("message", "param", 2.5, "message")


def test_codes_are_unique() -> None:
    codes = [cls.code for cls in ROWS]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_row_can_be_answered(cls: type[errors.BatonError]) -> None:
    assert 400 <= cls.http_status < 600
    assert cls.grpc_status in grpc.StatusCode.__members__
    assert cls.grpc_status != "OK"
    assert re.fullmatch(r"[a-z_]+", cls.code)
    assert re.fullmatch(r"[a-z_]+", cls.openai_type)
    assert cls.__doc__


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if issubclass(cls, errors.RequestError)])
def test_the_clients_own_faults_are_not_retried(cls: type[errors.BatonError]) -> None:
    assert cls.http_status < 500
    assert not cls.should_retry


def test_what_a_retry_can_help_says_so() -> None:
    retried = {cls for cls in CLASSES if cls.should_retry}
    assert retried == {errors.Overloaded, *(cls for cls in CLASSES if issubclass(cls, errors.NoCapacity))}


@pytest.mark.parametrize("code", ["", "from_the_future", "Overloaded"])
def test_unknown_code_is_an_internal_error(code: str) -> None:
    assert type(errors.from_code(code, "message")) is errors.InternalError
