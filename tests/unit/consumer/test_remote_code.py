"""A model whose configuration, classes and tokenizer are Python files of its own: they run everywhere, or nowhere."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM

from consumer.app.setup import model_config
from consumer.learn.options import build_lora
from consumer.learn.run_facts import run_facts
from consumer.prompts.dataset import PromptDataset
from consumer.prompts.tokenizer import load_tokenizer
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, JournalError
from protocol.wire.model_folder import base_model_digest, tokenizer_digest
from slipstream import export as export
from slipstream.journal.content import load_tokenizer as tokenizer_of_journal
from slipstream.sft import build_sft_arguments, train
from tests.integration.models import build_model_with_code
from tests.unit.consumer.builders import rollout_group, run_config
from tests.unit.consumer.trl_reference import loss_and_gradients, slipstream_trainer

FIX = "it needs the Python files that come with it; read them, and set model.trust_remote_code=true to run them"


@pytest.fixture(scope="module", autouse=True)
def _imported_from_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """transformers copies such files to a folder of the user's, and imports them from there."""
    folder = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", folder)
        patch.syspath_prepend(folder)
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        del sys.modules[name]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build_model_with_code(tmp_path / "with_code")


def config_of(model: Path, *, trusted: bool = True, **sections: Any) -> RunConfig:
    values = {"path": str(model), "dtype": "float32", "trust_remote_code": trusted}
    plain = run_config(model.parent / "run", model, **sections)
    return RunConfig.model_validate(plain.model_dump() | {"model": values})


def groups() -> list[Any]:
    return [rollout_group([[11, 12, 13], [14], [15, 16], [17]]), rollout_group([[18], [19], [20, 21], [22]])]


def test_without_trust_nothing_of_it_is_read_and_the_error_says_the_fix(model: Path) -> None:
    for read in (
        lambda: load_tokenizer(model, trust_remote_code=False),
        lambda: model_config(model, trust_remote_code=False),
        lambda: slipstream_trainer(config_of(model, trusted=False), model),
    ):
        with pytest.raises(ConfigError) as caught:
            read()
        assert str(caught.value).startswith("model.path: transformers cannot read ")
        assert str(caught.value).endswith(FIX)


@pytest.mark.long
def test_the_trainer_trains_it(model: Path) -> None:
    trainer = slipstream_trainer(config_of(model), model)
    assert type(trainer.base).__name__ == "OwnForCausalLM"
    assert type(trainer.processing_class).__name__ == "OwnTokenizer"
    assert model_config(model, trust_remote_code=True).vocab_size == trainer.base.config.vocab_size
    assert loss_and_gradients(trainer, trainer._prepare_inputs(trainer.recipe.tensors(groups())))[1].abs().max() > 0


def test_prompts_are_counted_by_its_tokenizer(model: Path) -> None:
    rows = model.parent / "rows.jsonl"
    rows.write_text('{"prompt": "1+1="}\n{"prompt": "11111111111+1="}\n')
    section = config_of(model, dataset={"path": str(rows), "max_prompt_tokens": 6}).dataset
    assert len(PromptDataset(section, model, trust_remote_code=True)) == 1


@pytest.mark.long
def test_an_adapter_is_trained_by_imitation_and_exported_with_its_code(model: Path) -> None:
    config = config_of(model, sft={"max_steps": 1, "gradient_checkpointing": False})
    arguments = build_sft_arguments(config, model.parent / "sft", on_gpu=False)
    rows = Dataset.from_list([{"prompt": "1+1=", "completion": "2"}] * 2)
    trained = train(config, model, arguments, build_lora(config), rows, "", None)
    trained.save_pretrained(model.parent / "adapter")
    to = model.parent / "merged"
    assert export.run(config, [], which=str(model.parent / "adapter"), to=to, repository=None) == 0
    assert (to / "modeling_own.py").is_file()
    assert type(load_tokenizer(to, trust_remote_code=True)).__name__ == "OwnTokenizer"
    merged = AutoModelForCausalLM.from_pretrained(to, trust_remote_code=True)
    assert type(merged).__name__ == "OwnForCausalLM"
    assert torch.isfinite(merged(input_ids=torch.tensor([[3, 4]])).logits).all()


def test_two_daemons_that_would_run_other_code_hold_other_models(model: Path) -> None:
    trusted = {"trust_remote_code": True}
    digests = [base_model_digest(model), tokenizer_digest(model)]
    with_code = [base_model_digest(model, **trusted), tokenizer_digest(model, **trusted)]
    (model / "modeling_own.py").write_text("changed = True\n")
    assert [base_model_digest(model), tokenizer_digest(model)] == digests
    assert len({*digests, *with_code, base_model_digest(model, **trusted), tokenizer_digest(model, **trusted)}) == 6


def test_whoever_reads_a_journal_runs_no_code_that_it_names(model: Path) -> None:
    facts = run_facts(config_of(model), model, "run", 64, 1, 1)
    assert facts["trust_remote_code"] == "true"
    with pytest.raises(JournalError, match=r"cannot be loaded: The repository .* contains custom code"):
        tokenizer_of_journal(facts)
