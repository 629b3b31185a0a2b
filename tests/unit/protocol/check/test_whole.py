"""All mistakes of a file in one round, each with its own line."""

import re
from pathlib import Path

import pytest

from protocol.check.whole import check_file, check_library_sections
from protocol.config.library_fields import fields_of
from protocol.config.library_section import OWN_KEYS, placed_keys
from protocol.config.other_names import OTHER_NAMES
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from tests.unit.protocol.config.files import MINIMAL, NEXT, write_inputs

EVERYWHERE = """\
pipeline:
  max_stalenes: 2
sampling: {top_p: 0.9}
reroll:
  fail_threshold: 1
  reward: exakt
engine:
  max_modle_len: 64
  max_lora_rank: 64
  gpu_memory_utilization: a lot
lora:
  lora_rank: 4
trainer:
  learning_rate: 1e-4x
  max_prompt_length: 64
  vllm_mode: colocate
  lr_scheduler_type: cosin
sft:
  max_stepz: 3
"""


@pytest.fixture
def run_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    return tmp_path / "run.yaml"


def mistakes(file: Path, text: str, overrides: list[str] | None = None) -> list[str]:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        check_file("run.yaml", overrides)
    return str(caught.value).splitlines()


def test_mistakes_of_all_sections_are_one_round(run_yaml: Path) -> None:
    said = mistakes(run_yaml, MINIMAL + EVERYWHERE, ["advantage.overlong_buffer_tokens=999", "trainer.max_step=3"])
    keys = [
        (1, "pipeline.max_stalenes", "did you mean `max_staleness`?"),
        (2, "sampling", "accept_biased_ratios"),
        (4, "reroll", "solved_threshold"),
        (5, "reroll.reward", "exact"),
        (7, "engine.max_modle_len", "did you mean `max_model_len`?"),
        (8, "engine.max_lora_rank", "lora.r"),
        (9, "engine.gpu_memory_utilization", "a number (got 'a lot')"),
        (11, "lora.lora_rank", "use r"),
        (13, "trainer.learning_rate", "a number (got '1e-4x')"),
        (14, "trainer.max_prompt_length", "dataset.max_prompt_tokens"),
        (15, "trainer.vllm_mode", "pipeline.gpu"),
        (16, "trainer.lr_scheduler_type", "did you mean `cosine`?"),
        (18, "sft.max_stepz", "did you mean `max_steps`?"),
    ]
    assert len(said) == len(keys) + 2, "\n".join(said)
    for line, (number, key, fix) in zip(said, keys, strict=False):
        assert line.startswith(f"run.yaml:{NEXT + number}: {key}: ")
        assert fix in line
    assert said[-2].startswith("--set advantage.overlong_buffer_tokens=999: ")
    assert said[-1].startswith("--set trainer.max_step=3: ")
    assert "did you mean `max_steps`?" in said[-1]


def test_what_follows_from_another_mistake_is_not_said(run_yaml: Path) -> None:
    """A reward that is not known has no name, which the metric of an evaluation would miss."""
    text = MINIMAL.replace("rewards.py:exact", "numeric_mach") + "reroll: {reward: numeric_match}\n"
    [said] = mistakes(run_yaml, text)
    assert said.startswith("run.yaml:8: rewards.functions.0.function: ")


def test_the_line_is_that_of_the_key_also_in_what_is_merged_in_and_in_lists(run_yaml: Path) -> None:
    text = MINIMAL + (
        "trainer: &t\n  max_stepz: 3\n"
        "sft:\n  <<: *t\n  max_steps: 5\n"
        "environments:\n- name: one\n  factory: rewards.py:exact\n- name: two\n  factory: rewards.py:exact\n  max_turn: 3\n"
        "loss:\n  ce_coef: 0.1\n"
    )
    said = mistakes(run_yaml, text, ["rewards.functions.0.wieght=2"])
    assert [line.split(": ")[0] for line in said][:3] == ["run.yaml:10", "run.yaml:10", "run.yaml:19"]
    assert any(line.startswith("run.yaml:21: loss.ce_coef: ") for line in said)
    assert said[-1].startswith("--set rewards.functions.0.wieght=2: ")


@pytest.mark.parametrize("section", ["trainer", "lora", "engine", "sft"])
@pytest.mark.parametrize("given", ["hello", "[1]", "true", "{5: 1}", "{[a]: 1}"])
def test_a_library_section_of_another_form_is_named(run_yaml: Path, section: str, given: str) -> None:
    [said] = mistakes(run_yaml, f"{MINIMAL}{section}: {given}\n")
    assert said.startswith(f"run.yaml:{NEXT}: ")


def test_a_secret_of_the_command_line_is_not_repeated(run_yaml: Path) -> None:
    [said] = mistakes(run_yaml, MINIMAL, ["trainer.hub_token=hf_secret"])
    assert "--set trainer.hub_token=...: " in said
    assert "hf_secret" not in said


@pytest.mark.parametrize(
    ("added", "key"),
    [
        ("learning_rate: 1e-5", "trainer.learning_rate"),
        ("max_completion_length: 64", "sampling.max_completion_length"),
        ("base_model: x", "model.path"),
        ("actor_rollout_ref: {rollout: {n: 5}}", "sampling.num_generations"),
        ("actor_rollout_ref: {actor: {optim: {lr: 1e-6}}}", "trainer.learning_rate"),
        ("trainer: {total_epochs: 3}", "num_train_epochs"),
        ("trainer: {per_device_train_batch_size: 8}", "pipeline.groups_per_step"),
        ("trainer: {warmup_ratio: 0.1}", "warmup_steps"),
        ("trainer: {max_completion_lenght: 0.1}", "sampling.max_completion_length"),
        ("trainer: {overwrite_output_dir: true}", "--resume"),
        ("sampling: {groups_per_step: 3}", "pipeline.groups_per_step"),
        ("lora: {rank: 3}", "use r"),
    ],
)
def test_keys_of_others_and_of_other_sections_name_ours(run_yaml: Path, added: str, key: str) -> None:
    [said] = mistakes(run_yaml, MINIMAL + added + "\n")
    assert key in said.partition(": ")[2].partition(": ")[2]


def test_a_daemon_that_starts_names_the_lines_of_library_keys(run_yaml: Path) -> None:
    run_yaml.write_text(MINIMAL + "trainer: {max_step: 3}\nengine:\n  max_modle_len: 3\n")
    with pytest.raises(ConfigError) as caught:
        check_library_sections("run.yaml")
    assert [line.split(": ")[0] for line in str(caught.value).splitlines()] == [
        f"run.yaml:{NEXT}",
        f"run.yaml:{NEXT + 2}",
    ]


def test_every_key_that_is_named_in_place_of_another_may_be_given(run_yaml: Path) -> None:
    """None is refused as unknown, or as another's to set."""
    sections = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    libraries = {
        name: {*(fields_of(name) or ()), *OWN_KEYS.get(name, {})} for name in ("trainer", "lora", "engine", "sft")
    }
    for owner, names in OTHER_NAMES.items():
        for key, text in names.items():
            for section, name in re.findall(r"\b(\w+)\.(\w+)", text):
                if section in libraries:
                    assert name in libraries[section] - placed_keys(section, {name: 1}).keys(), (owner, key)
                elif section not in ("options", "structured_outputs_config"):
                    fields = getattr(sections[section], "model_fields", None) or {}
                    optional = getattr(sections[section], "__args__", ())
                    fields = fields or next(part.model_fields for part in optional if hasattr(part, "model_fields"))
                    assert name in fields, (owner, key)
            for name in re.findall(r"use (\w+)(?:$|[,:])", text):
                if owner in libraries:
                    assert name in (libraries[owner] - placed_keys(owner, {name: 1}).keys()) | set(sections), (
                        owner,
                        key,
                    )
