"""Keys of TRL that would do nothing here, or harm, are refused where the file is read, with their value and the fix."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from protocol.config import trainer_keys
from protocol.config.trainer_keys import DEFAULTS, REFUSED, REFUSED_VALUES, RESERVED, WORKS
from tests.unit.protocol.config.files import MINIMAL, NEXT, load, refusal


def other_than(default: Any) -> Any:
    """A value of the same kind."""
    match default:
        case bool():
            return not default
        case int() | float():
            return default + 1
        case list():
            return ["loss"]
    return "other"


def trainer_section(**values: Any) -> str:
    lines = [yaml.safe_dump({key: value}, default_flow_style=None) for key, value in values.items()]
    return MINIMAL + "trainer:\n  # comment\n" + "".join(f"  {line}" for line in lines)


def test_a_key_may_have_the_value_that_changes_nothing_and_no_other(run_yaml: Path) -> None:
    defaults = {key: refused.default for key, refused in REFUSED.items()}
    assert load(run_yaml, MINIMAL + yaml.safe_dump({"trainer": defaults})).trainer == DEFAULTS | defaults
    for key, (default, reason, instead) in REFUSED.items():
        value = other_than(default)
        shown = "..." if key == "hub_token" else value
        fix = f"use {instead} instead" if instead else "remove it"
        assert trainer_keys.refusal(key, value) == f"`{key}: {shown}` is refused: {reason}; {fix}"
    message = f"`{key}: {shown}` is refused: {reason}; {fix}"
    assert refusal(run_yaml, trainer_section(**{key: value})) == f"run.yaml:{NEXT + 2}: trainer.{key}: {message}"
    assert refusal(run_yaml, overrides=[f"trainer.{key}={value}"]) == f"--set trainer.{key}={value}: {message}"


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in REFUSED_VALUES.items() for value in values])
def test_some_values_of_keys_that_work_are_refused(run_yaml: Path, key: str, value: str) -> None:
    said = refusal(run_yaml, trainer_section(**{key: value}))
    assert said == f"run.yaml:{NEXT + 2}: trainer.{key}: `{key}: {value}` is refused: {REFUSED_VALUES[key][value]}"


def test_every_key_is_in_one_place_and_no_secret_in_a_message(run_yaml: Path) -> None:
    working = [key for keys in WORKS.values() for key in keys]
    everything = [*working, *REFUSED, *RESERVED]
    assert len(everything) == len(set(everything))
    assert set(REFUSED_VALUES) <= set(working)
    assert "hf_abc" not in refusal(run_yaml, overrides=["trainer.hub_token=hf_abc"])
