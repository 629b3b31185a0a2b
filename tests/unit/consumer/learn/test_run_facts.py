"""What a journal remembers of its run, and which configurations may go on with it."""

import json
from pathlib import Path
from typing import Any

import pytest

from consumer.learn.run_facts import check_same_batches, comparable, credits_of, dataset_change, run_facts
from protocol.errors import ConfigError, DatasetError
from protocol.wire.codec import SCHEMA_VERSION
from protocol.wire.model_folder import base_model_digest, tokenizer_digest
from replay.credit import CreditRecipe
from tests.unit.consumer.builders import run_config

JOURNAL = Path("run/journal.sqlite")
FACTS = {
    "base_model_digest": "base",
    "tokenizer_digest": "tokens",
    "wire_schema": str(SCHEMA_VERSION),
    "num_generations": "4",
    "max_completion_length": "6",
    "vocab_size": "64",
    "reward_names": '["first"]',
    "groups_per_step": "2",
}


def test_the_facts_of_a_run(tmp_path: Path, tiny_model: Path) -> None:
    functions = [{"function": "r:exact", "weight": 1.0}, {"function": "some/file.py:style", "weight": 0.1}]
    config = run_config(tmp_path, tiny_model, rewards={"functions": functions})
    assert run_facts(config, tiny_model, "0123", 64, 3, 7) == {
        "run_id": "0123",  # as it is, although it looks like a number
        "model_path": str(tiny_model),
        "base_model_digest": base_model_digest(tiny_model),
        "tokenizer_digest": tokenizer_digest(tiny_model),
        "reward_names": '["exact", "style"]',
        "reward_weights": "[1.0, 0.1]",
        "credit": "",
        "wire_schema": str(SCHEMA_VERSION),
        "num_generations": "4",
        "max_completion_length": "6",
        "vocab_size": "64",
        "groups_per_step": "2",
        "fill": "sampled",
        "num_iterations": "3",
        "quantization": "",
        "model_dtype": "float32",
        "sampling": '{"num_generations": 4, "max_completion_length": 6, "temperature": 1.0, "top_p": 1.0, "top_k": 0, '
        '"min_p": 0.0, "stop": [], "stop_token_ids": [], "ignore_eos": false, "regex": "", "json_schema": ""}',
        "num_threads": "7",
        "trust_remote_code": "false",
    }


def test_the_same_facts_are_comparable_whatever_else_changed() -> None:
    assert comparable(FACTS, FACTS | {"groups_per_step": "8", "num_threads": "2", "model_path": "moved"}, JOURNAL)


def test_groups_of_another_schema_are_not_comparable() -> None:
    assert not comparable(FACTS | {"wire_schema": str(SCHEMA_VERSION + 1)}, FACTS, JOURNAL)


@pytest.mark.parametrize(
    "name",
    ["num_generations", "max_completion_length", "vocab_size", "reward_names", "has_teachers", "teacher_top_k"],
)
def test_groups_of_another_shape_are_not(name: str) -> None:
    assert not comparable(FACTS, FACTS | {name: "5"}, JOURNAL)


@pytest.mark.parametrize(
    ("name", "key"), [("base_model_digest", "model.path"), ("tokenizer_digest", "model.path (its tokenizer)")]
)
def test_groups_of_another_model_are_refused(name: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        comparable(FACTS, FACTS | {name: "other"}, JOURNAL)
    assert str(caught.value) == (
        f"{key} differs from that of run/journal.sqlite; use the same one, or choose another run_dir"
    )


def facts_of(folder: Path, model: Path, **sections: Any) -> dict[str, str]:
    return run_facts(run_config(folder, model, "bfloat16", **sections), model, "run-1", 64, 1, 1)


def test_a_run_goes_on_with_the_parameters_that_it_trained(tiny_model: Path, tmp_path: Path) -> None:
    adapter, whole = facts_of(tmp_path, tiny_model), facts_of(tmp_path, tiny_model, lora=None)
    norms, both = (
        facts_of(tmp_path, tiny_model, lora=None, trainable=names) for names in (["*norm*"], ["*norm*", "*mlp*"])
    )
    for before, now, key in (
        (adapter, whole, "lora"), (whole, adapter, "lora"), (adapter, norms, "lora"),
        (whole, norms, "trainable"), (norms, whole, "trainable"), (norms, both, "trainable"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=rf"^{key} differs .*run_dir"):
            comparable(before, now, JOURNAL)
        with pytest.raises(ConfigError, match=rf"^--from-journal: {key} is "):
            check_same_batches(before, now, JOURNAL)
    in_another_order = facts_of(tmp_path, tiny_model, lora=None, trainable=["*mlp*", "*norm*"])
    assert comparable(both, in_another_order, JOURNAL)
    assert comparable(whole, facts_of(tmp_path, tiny_model, lora=None, trainable=["*"]), JOURNAL)


DATASET = {"num_prompts": "40", "dataset_digest": "rows"}


def test_a_dataset_that_stayed_or_that_nobody_noted_is_no_change() -> None:
    assert dataset_change(DATASET, DATASET, JOURNAL) is None
    assert dataset_change({}, DATASET, JOURNAL) is None


def test_a_dataset_of_another_size_is_refused() -> None:
    with pytest.raises(DatasetError, match=r"it has 41 prompts now and had 40 when run/journal.sqlite was written"):
        dataset_change(DATASET, DATASET | {"num_prompts": "41"}, JOURNAL)


def test_other_rows_are_named() -> None:
    change = dataset_change(DATASET, DATASET | {"dataset_digest": "others"}, JOURNAL)
    assert change is not None
    assert all(each in change for each in ("dataset", str(JOURNAL), "run_dir"))


def test_a_run_with_an_environment_has_its_reward_among_the_others(tiny_model: Path, tmp_path: Path) -> None:
    config = run_config(tmp_path, tiny_model, environment={"factory": "shop:Shop", "reward_weight": 0.5})
    facts = run_facts(config, tiny_model, "run-1", 64, 1, 1)
    assert (facts["reward_names"], facts["reward_weights"]) == ('["first", "environment"]', "[1.0, 0.5]")


@pytest.mark.parametrize(("mode", "top_k"), [("advantage", None), ("divergence", "16")])
def test_the_likeliest_tokens_that_teachers_are_asked_for_are_a_fact(
    tiny_model: Path, tmp_path: Path, mode: str, top_k: str | None
) -> None:
    sections = {"teachers": [{"name": "big", "url": "http://h:1"}], "distillation": {"mode": mode}}
    facts = run_facts(run_config(tmp_path, tiny_model, **sections), tiny_model, "run-1", 64, 1, 1)
    assert facts.get("teacher_top_k") == top_k


def test_every_start_has_its_credit_and_what_a_restart_undoes_is_forgotten() -> None:
    before: dict[str, str] = {}
    for credit, step, expected in (
        ("a", 0, [[0, "a"]]),
        ("a", 5, [[0, "a"]]),
        ("", 8, [[0, "a"], [8, ""]]),
        ("b", 20, [[0, "a"], [8, ""], [20, "b"]]),
        ("a", 8, [[0, "a"]]),
        ("b", 8, [[0, "a"], [8, "b"]]),
    ):
        before["credits"] = credits_of(before, {"credit": credit}, step)
        assert json.loads(before["credits"]) == expected


def test_the_credit_of_a_run_is_a_fact(tiny_model: Path, tmp_path: Path) -> None:
    options = {"credit": "per_turn", "gamma": 0.5, "outcome_weight": 2.0}
    facts = run_facts(run_config(tmp_path, tiny_model, rewards=options), tiny_model, "run-1", 64, 1, 1)
    assert CreditRecipe(**json.loads(facts["credit"])) == CreditRecipe("per_turn", 0.5, 2.0)
