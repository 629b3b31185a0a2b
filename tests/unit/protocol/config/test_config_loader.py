"""The file itself, and what `--set` puts over it."""

import re
from pathlib import Path

import pytest

from protocol.config.loader import load_config
from protocol.config.trainer_keys import DEFAULTS
from protocol.errors import ConfigError
from tests.unit.protocol.config.files import MINIMAL, NEXT, load, refusal


def test_a_missing_file(run_yaml: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("absent.yaml")
    assert str(caught.value).startswith("absent.yaml: no such file.")
    assert "slipstream init" in str(caught.value)


def test_a_folder_and_a_binary_file(run_yaml: Path) -> None:
    with pytest.raises(ConfigError, match=r"^\.: cannot be read: .*Is a directory"):
        load_config(".")
    run_yaml.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"^run\.yaml: cannot be read: .*utf-8"):
        load_config("run.yaml")


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a\n- b\n", "just words", "42"])
def test_a_file_that_is_no_mapping(run_yaml: Path, text: str) -> None:
    assert refusal(run_yaml, text) == "run.yaml: expected a mapping with sections such as `model:` and `dataset:`"


@pytest.mark.parametrize(
    "text",
    [
        "model: [",
        "model:\n\tpath: x",
        "seed: *nowhere",
        "seed: !!python/object/apply:os.getcwd []",
        "seed: 2024-13-45",  # PyYAML raises ValueError
        "seed: !!timestamp x",  # PyYAML raises AttributeError
        "seed: " + "[" * 600,  # PyYAML raises RecursionError
        "seed: &loop [*loop]",
        "? [a, b]\n: 1",
        "? {a: b}\n: 1",
    ],
)
def test_a_file_that_is_no_yaml(run_yaml: Path, text: str) -> None:
    assert re.match(r"run\.yaml:(\d+:)? not valid YAML: [a-z]|run\.yaml:1: not valid YAML: \d", refusal(run_yaml, text))


def test_a_key_given_twice_is_refused(run_yaml: Path) -> None:
    """YAML would keep the last one without a word."""
    assert (
        refusal(run_yaml, MINIMAL + "seed: 1\nseed: 2\n")
        == f"run.yaml:{NEXT + 1}: `seed` is given twice, first in line {NEXT}"
    )
    assert refusal(run_yaml, MINIMAL + "trainer:\n  beta: 0.1\n  loss_type: dapo\n  beta: 0.2\n") == (
        f"run.yaml:{NEXT + 3}: `beta` is given twice, first in line {NEXT + 1}"
    )
    assert "`weight` is given twice" in refusal(run_yaml, MINIMAL + "      weight: 1\n      weight: 2\n")
    assert "`a` is given twice" in refusal(run_yaml, MINIMAL + "trainer: {a: 1, a: 2}\n")


def test_merge_keys_and_anchors_work(run_yaml: Path) -> None:
    text = MINIMAL + "trainer: &t {learning_rate: 0.1}\nsft:\n  <<: *t\n  <<: {max_steps: 16}\n  max_length: 8\n"
    assert load(run_yaml, text).sft == {"learning_rate": 0.1, "max_steps": 16, "max_length": 8}


def test_a_key_that_is_no_string(run_yaml: Path) -> None:
    said = "1: the name of a key must be text; put it in quotes (got 1)"
    assert refusal(run_yaml, MINIMAL + "1: 2\n") == f"run.yaml:{NEXT}: {said}"


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("pipeline.max_staleness=2", "pipeline", "max_staleness", 2),
        ("sampling.temperature=0.7", "sampling", "temperature", 0.7),
        ("sampling.temperature=7e-1", "sampling", "temperature", 0.7),
        ("dataset.shuffle=false", "dataset", "shuffle", False),
        ("dataset.subset=main", "dataset", "subset", "main"),
        ("dataset.subset=", "dataset", "subset", None),
        ("dataset.subset=null", "dataset", "subset", None),
        ("dataset.subset=a=b", "dataset", "subset", "a=b"),
        (
            "dataset.chat_template_kwargs={enable_thinking: false}",
            "dataset",
            "chat_template_kwargs",
            {"enable_thinking": False},
        ),
        ("dataset.chat_template_kwargs.depth=3", "dataset", "chat_template_kwargs", {"depth": 3}),
    ],
)
def test_overrides(run_yaml: Path, override: str, section: str, key: str, value: object) -> None:
    got = getattr(getattr(load(run_yaml, overrides=[override]), section), key)
    assert got == value
    assert type(got) is type(value)


def test_overrides_of_library_sections_go_deep_and_the_last_wins(run_yaml: Path) -> None:
    config = load(
        run_yaml,
        MINIMAL + "trainer:\nengine: {max_model_len: 64}\n",
        [
            "seed=1",
            "seed=2",
            "trainer.learning_rate=1e-5",
            "trainer.lr_scheduler_kwargs.num_cycles=2",
            "trainer.report_to=[tensorboard]",
            "engine.max_model_len=128",
            "lora.r=4",
            "rewards.functions=[{function: 'a.b:c', name: c}]",
            "rewards.functions.0.weight=2",
        ],
    )
    assert config.seed == 2
    assert config.trainer == DEFAULTS | {
        "learning_rate": "1e-5",  # YAML 1.1 has no such float; protocol.config.library_section makes it one
        "lr_scheduler_kwargs": {"num_cycles": 2},
        "report_to": ["tensorboard"],
    }
    assert config.engine == {"max_model_len": 128}
    assert config.lora == {"r": 4, "lora_alpha": 32, "target_modules": "all-linear"}
    assert [(f.name, f.weight) for f in config.rewards.functions] == [("c", 2.0)]


@pytest.mark.parametrize("override", ["seed", "", "=1", ".seed=1", "model..path=x", "model.=x"])
def test_an_override_of_another_form_is_refused(run_yaml: Path, override: str) -> None:
    assert refusal(run_yaml, overrides=[override]) == (
        f"--set {override}: expected section.key=value, e.g. --set pipeline.max_staleness=2"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=[", "--set seed=[: the value is not valid YAML: "),
        ("seed=2024-13-45", "--set seed=2024-13-45: the value is not valid YAML: 2024-13-45 is no date"),
        ("run_dir.x=1", "--set run_dir.x=1: `run_dir` is not a section"),
        (
            "rewards.functions.1.weight=1",
            "--set rewards.functions.1.weight=1: `1` is no part of the list, which has 1, numbered",
        ),
        (
            "rewards.functions.x.weight=1",
            "--set rewards.functions.x.weight=1: `x` is no part of the list, which has 1, numbered",
        ),
        ("rewards.functions.0=1", "--set rewards.functions.0=1: a part of a list has no name to set; name a key of it"),
        ("rewards.functions.0.function.x=1", "--set rewards.functions.0.function.x=1: `function` is not a section"),
        ("seed=x", "--set seed=x: expected a whole number >= 0 (got 'x')"),
        ("model.pth=x", "--set model.pth=x: unknown key `pth`; did you mean `path`?"),
        (
            "model={pth: x, path: y}",
            "--set model={pth: x, path: y}: model.pth: unknown key `pth`; did you mean `path`?",
        ),
        ("trainr.beta=1", "--set trainr.beta=1: unknown key `trainr`; did you mean `trainer`?"),
        (
            "pipeline.trainer_tokens_per_micro_batch=soon",
            "--set pipeline.trainer_tokens_per_micro_batch=soon: expected a whole number >= 1, or `auto` (got 'soon')",
        ),
        (
            "pipeline.sync_interval=0",
            "--set pipeline.sync_interval=0: expected a whole number >= 1 (got 0)",
        ),
    ],
)
def test_a_bad_override_is_named(run_yaml: Path, override: str, message: str) -> None:
    assert refusal(run_yaml, overrides=[override]).startswith(message)


def test_a_transform_names_a_place_and_a_function(run_yaml: Path) -> None:
    assert load(run_yaml, overrides=["dataset.transform=gsm8k:to_prompt"]).dataset.transform == "gsm8k:to_prompt"
    assert refusal(run_yaml, overrides=["dataset.transform=to_prompt"]) == (
        "--set dataset.transform=to_prompt: expected `module:function` or `path/to/file.py:function` (got 'to_prompt')"
    )


def test_a_bad_value_of_the_file_can_be_overridden(run_yaml: Path) -> None:
    assert load(run_yaml, MINIMAL + "seed: x\n", ["seed=3"]).seed == 3
