"""From a warm start to the export of a vision-language checkpoint: every tool takes what the one before wrote."""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from consumer.learn.adapters import initial_adapter
from consumer.learn.model import load_model
from consumer.learn.options import build_lora
from slipstream import export as export
from slipstream.sft import build_sft_arguments, train
from tests.integration.models import reference_logprobs
from tests.integration.vision_models import build_vision_model
from tests.unit.consumer.builders import run_config
from tests.unit.consumer.trl_reference import slipstream_trainer


@pytest.mark.long
def test_a_warm_start_begins_a_run_and_its_export_is_a_whole_checkpoint(tmp_path: Path) -> None:
    checkpoint, adapter, to = (
        build_vision_model("gemma3", tmp_path / "model"),
        tmp_path / "adapter",
        tmp_path / "merged",
    )
    (checkpoint / "preprocessor_config.json").write_text('{"do_resize": true}')
    config = run_config(tmp_path, checkpoint, sft={"max_steps": 2, "learning_rate": 0.1})
    arguments, lora = build_sft_arguments(config, tmp_path / "sft", on_gpu=False), build_lora(config)
    rows = Dataset.from_list([{"prompt": "1+1=", "completion": "2"}] * 2)
    train(config, checkpoint, arguments, lora, rows, "", None).save_pretrained(adapter)

    trainer = slipstream_trainer(config, checkpoint)
    trainer.start_from(initial_adapter(str(adapter), build_lora(config)), resumed=False)
    expected = reference_logprobs(checkpoint, adapter, [3, 4], [5, 6, 7], 1.0)
    with torch.no_grad():
        logits = trainer.model.eval()(input_ids=torch.tensor([[3, 4, 5, 6, 7]])).logits[0, 1:-1]
    started = logits.log_softmax(-1).gather(1, torch.tensor([[5], [6], [7]]))[:, 0]
    torch.testing.assert_close(started, expected, atol=1e-5, rtol=0)
    assert (expected - reference_logprobs(checkpoint, None, [3, 4], [5, 6, 7], 1.0)).abs().max() > 0.01

    assert export.run(config, [], which=str(adapter), to=to, repository=None) == 0
    torch.testing.assert_close(reference_logprobs(to, None, [3, 4], [5, 6, 7], 1.0), expected, atol=1e-4, rtol=0)
    assert type(load_model(to)).__name__ == "Gemma3ForConditionalGeneration"
    assert json.loads((to / "preprocessor_config.json").read_text()) == {"do_resize": True}
    before, after = load_file(checkpoint / "model.safetensors"), load_file(to / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name.startswith("vision_tower."))
