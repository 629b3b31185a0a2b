"""Whose code raised an exception, and what a user reads of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2 import Environment
from safetensors import safe_open

from protocol.config.section import Section
from protocol.errors import ConfigError, DeviceError
from protocol.library_errors import library_of, reading, reason_of
from protocol.wire.model_check import read_header

pytestmark = pytest.mark.usefixtures("stubs_are_slipstream")


def raised(work: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011  any is meant
        work()
    return caught.value


@pytest.mark.parametrize(
    ("work", "library"),
    [
        (lambda: dict[str, int]()["absent"], None),
        (lambda: json.loads("{"), None),  # Python's own, called by us
        (lambda: read_header(Path("/nowhere")), None),
        (lambda: Section.model_validate({"unknown": 1}), "pydantic_core"),
        (lambda: yaml.safe_load("a: ["), "yaml"),
        (lambda: Environment(autoescape=True).from_string("{{ }"), "jinja2"),
        (lambda: Environment(autoescape=True).from_string("{{ 1 / 0 }}").render(), "jinja2"),
        (lambda: safe_open(__file__, "np"), "safetensors"),
    ],
)
def test_an_exception_is_of_the_code_that_raised_it(work: Callable[[], Any], library: str | None) -> None:
    found = library_of(raised(work))
    assert found is None if library is None else (found or "").startswith(library)


def test_what_a_library_refuses_is_said_whole_and_in_one_line() -> None:
    with pytest.raises(ConfigError) as caught, reading("model.path: the template"):
        Environment(autoescape=True).from_string("a\n{{ b }\n{{ c }}")
    assert str(caught.value) == "model.path: the template: jinja2: TemplateSyntaxError: unexpected '}'"
    assert reason_of(ValueError("one of:\n  (1) a file\n  (2) another")) == "one of: (1) a file (2) another"
    assert reason_of(KeyError("model")) == "KeyError: 'model'"
    assert reason_of(ValueError()) == "ValueError: "
    assert len(reason_of(RuntimeError(10_000 * "size mismatch "))) < 700


def test_what_the_system_refuses_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^the model: {tmp_path}: Is a directory; .*"), reading("the model"):
        tmp_path.read_text()
    with pytest.raises(ConfigError, match=r"^the model: OSError: no space"), reading("the model"):
        raise OSError("no space")


@pytest.mark.parametrize(
    "error", [DeviceError("no memory"), KeyError("ours"), AssertionError(), RuntimeError("CUDA out of memory")]
)
def test_our_own_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, reading("the model"):
        raise error
    assert caught.value is error
