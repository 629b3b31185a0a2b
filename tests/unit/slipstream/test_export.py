"""What is exported is what was trained, and which of a run's adapters that is."""

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from consumer.learn.model import quantization_config
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from protocol.wire import weight_patch
from protocol.wire.adapter_blob import Anchor
from slipstream import export as export
from slipstream.adapters import choose_adapter
from slipstream.model_card import model_card
from tests.integration.models import random_adapter, random_patch, reference_logprobs
from tests.unit.consumer.builders import run_config
from tests.weight_patches import patch_between


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> RunConfig:
    """A finished run of four steps, checkpoints at 2 and 4."""
    config = run_config(tmp_path / "run", tiny_model)
    run_dir = Path(config.run_dir)
    random_adapter(tiny_model, run_dir / "adapter", rank=4)
    for step in (2, 4):
        folder = Path(shutil.copytree(run_dir / "adapter", config.checkpoints_dir / f"checkpoint-{step}"))
        (folder / "pipeline_state.json").write_text(json.dumps({"step": step, "run_id": "r"}))
    (run_dir / "trainer.json").write_text(json.dumps({"finished": True, "steps": 4}))
    return config


@pytest.mark.long
def test_the_merged_model_is_the_trained_one(run: RunConfig, tiny_model: Path, capsys: Any) -> None:
    to = Path(run.run_dir) / "merged"
    export.run(run, [], which="last", to=to, repository=None)
    merged = reference_logprobs(to, None, [3, 4], [5, 6, 7], 1.0)
    adapted = reference_logprobs(tiny_model, Path(run.run_dir) / "adapter", [3, 4], [5, 6, 7], 1.0)
    rounding = torch.finfo(torch.float32).eps * adapted.abs().max().item()
    torch.testing.assert_close(merged, adapted, atol=100 * rounding, rtol=0)
    assert AutoTokenizer.from_pretrained(to)("1+1=") == AutoTokenizer.from_pretrained(tiny_model)("1+1=")
    assert AutoModelForCausalLM.from_pretrained(to).dtype == torch.float32
    assert (to / "README.md").is_file()
    assert "log-probs agree to" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="merged exists already"):
        export.run(run, [], which="last", to=to, repository=None)


@pytest.mark.long
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_a_quantized_base_is_left_out_or_dequantized(run: RunConfig, tiny_model: Path) -> None:
    """The trainer computes with the rounded base, the engine with the whole one; each can be exported."""
    with pytest.raises(ConfigError, match="there is nothing to dequantize"):
        export.run(run, [], which="last", to=Path(run.run_dir) / "none", repository=None, dequantized=True)
    quantized = run.model_copy(update={"model": run.model.model_copy(update={"quantization": "nf4"})})
    adapter, found = Path(run.run_dir) / "adapter", []
    for dequantized in (False, True):
        to = Path(run.run_dir) / f"merged {dequantized}"
        export.run(quantized, [], which="last", to=to, repository=None, dequantized=dequantized)
        assert "quantization_config" not in json.loads((to / "config.json").read_text())
        found.append(reference_logprobs(to, None, [3, 4], [5, 6, 7], 1.0))
    original, rounded = found
    adapted = reference_logprobs(tiny_model, adapter, [3, 4], [5, 6, 7], 1.0)
    torch.testing.assert_close(original, adapted, atol=1e-4, rtol=0)
    options = {"dtype": torch.float32, "quantization_config": quantization_config(quantized.model)}
    base: Any = AutoModelForCausalLM.from_pretrained(tiny_model, **options)
    trained = PeftModel.from_pretrained(base, adapter).train()  # as the trainer computes: eval() rounds on a CPU
    with torch.no_grad():
        logits = trained(torch.tensor([[3, 4, 5, 6, 7]])).logits[0, 1:-1].float()
    expected = logits.log_softmax(-1).gather(1, torch.tensor([[5], [6], [7]]))[:, 0]
    torch.testing.assert_close(rounded, expected, atol=1e-3, rtol=0)
    assert (rounded - original).abs().max() > 0.01


@pytest.mark.long
def test_a_model_that_computes_something_else_is_not_written(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = export.logprobs
    monkeypatch.setattr(export, "logprobs", lambda model, ids: real(model, ids) + 0.1 * hasattr(model, "peft_config"))
    to = Path(run.run_dir) / "merged"
    with pytest.raises(ConfigError, match=r"differ by 0.1 .* more than 0.002; nothing was written"):
        export.run(run, [], which="last", to=to, repository=None)
    assert sorted(file.name for file in Path(run.run_dir).iterdir()) == ["adapter", "checkpoints", "trainer.json"]


def test_what_the_check_says() -> None:
    export.check(1e-4, 0.5, 2e-3, "float32")
    export.check(1e-6, 1e-6, 2e-3, "float32")
    with pytest.raises(ConfigError, match="differ by nan"):
        export.check(float("nan"), 0.5, 2e-3, "float32")
    with pytest.raises(ConfigError, match=r"rounding to bfloat16 loses what the adapter changes .*model.dtype=float32"):
        export.check(0.3, 0.4, 1.0, "bfloat16")


def test_which_adapter_is_meant(run: RunConfig, tmp_path: Path) -> None:
    run_dir = Path(run.run_dir)
    assert choose_adapter(run_dir, "last") == run_dir / "adapter"
    assert choose_adapter(run_dir, "2") == run.checkpoints_dir / "checkpoint-2"
    assert choose_adapter(run_dir, str(run_dir / "adapter")) == run_dir / "adapter"
    with pytest.raises(ConfigError, match=r"best: there are no weights in .*best; steps that the run has kept: 2, 4"):
        choose_adapter(run_dir, "best")
    shutil.copytree(run_dir / "adapter", run.checkpoints_dir / "best")
    assert choose_adapter(run_dir, "best") == run.checkpoints_dir / "best"
    (run_dir / "trainer.json").write_text(json.dumps({"finished": True, "steps": 3}))
    assert choose_adapter(run_dir, "last") == run.checkpoints_dir / "checkpoint-4", "the run went on after its end"
    (run_dir / "trainer.json").write_text(json.dumps({"finished": False, "steps": 4}))
    assert choose_adapter(run_dir, "last") == run.checkpoints_dir / "checkpoint-4", "... and was stopped"
    shutil.copytree(run_dir / "adapter", run_dir / "adapters" / "step-1")
    assert choose_adapter(run_dir, "1") == run_dir / "adapters" / "step-1", "of a checkpoint that is gone"
    shutil.rmtree(run_dir)
    with pytest.raises(ConfigError, match="has no weights yet"):
        choose_adapter(run_dir, "last")


@pytest.mark.long
def test_the_adapter_alone_with_its_card(run: RunConfig, tiny_model: Path) -> None:
    run_dir = Path(run.run_dir)
    rows = [{"step": step, "reward": step / 4} for step in range(1, 5)]
    (run_dir / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores = [{"step": s, "metric": "mean reward", "score": s / 8, "num_scored": 3} for s in (0, 2, 4)]
    (run_dir / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scores))
    to = run_dir / "exported"
    export.run(run, [], which="last", to=to, repository=None, is_adapter=True)
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), to)
    card = ModelCard.load(to / "README.md")
    assert card.data.library_name == "peft"
    assert {"grpo", "slipstream"} <= set(card.data.tags)
    assert card.data.base_model is None, "a local folder is nobody else's"
    assert str(tiny_model) not in card.content
    assert "steps | 0.625 |" in card.content
    assert "mean reward of 3 held-out prompts, step 0 | 0.000 |" in card.content
    assert "mean reward of 3 held-out prompts, step 4 | 0.500 |" in card.content
    assert "step 2" not in card.content
    assert f"transformers {transformers.__version__}" in card.content


def test_the_card_of_a_model_of_the_hub(run: RunConfig) -> None:
    of_hub = run.model_copy(update={"model": run.model.model_copy(update={"path": "me/base"})})
    data = model_card(of_hub, kind="merged").data
    assert (data.base_model, data.base_model_relation, data.library_name) == ("me/base", "finetune", "transformers")


class Hub:
    """Takes the place of huggingface_hub.HfApi."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def create_repo(self, repo_id: str, **options: Any) -> str:
        self.calls.append((repo_id, options))
        return f"https://hub.example/{repo_id}"

    def upload_folder(self, repo_id: str, **options: Any) -> None:
        if repo_id == "me/full":
            raise OSError("no space")
        self.calls.append((repo_id, options))


def test_uploads_go_where_they_were_told_and_nowhere_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = Hub()
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=lambda: hub))
    assert export.upload(tmp_path, "me/model") == "https://hub.example/me/model"
    assert hub.calls == [
        ("me/model", {"private": True, "exist_ok": True}),
        ("me/model", {"folder_path": tmp_path, "commit_message": "slipstream export"}),
    ]
    with pytest.raises(ConfigError, match=rf"--push-to-hub me/full: OSError: no space. The model is in {tmp_path}"):
        export.upload(tmp_path, "me/full")


@pytest.mark.long
def test_whole_weights_come_from_a_patch_or_from_a_checkpoint_in_float32(run: RunConfig, tiny_model: Path) -> None:
    run_dir, digits = Path(run.run_dir), run.model.model_copy(update={"dtype": "bfloat16"})
    full = run.model_copy(update={"lora": None, "model": digits})
    data, digest = random_patch(tiny_model, run_dir / "trained")
    weight_patch.unpack(data, digest, full.checkpoints_dir / "best")
    trained = load_file(run_dir / "trained" / "model.safetensors")
    checkpoint = Path(shutil.copytree(run_dir / "trained", run_dir / "checkpoint"))
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"use_cache": False}))  # as transformers trains
    # A little less than half the distance to the next number of 16 bits, so that rounding leads back.
    save_file({name: each.float() * (1 + 2**-10) for name, each in trained.items()}, checkpoint / "model.safetensors")
    below, anchor = random_patch(tiny_model, run_dir / "anchor", seed=1)
    states = (load_file(run_dir / name / "model.safetensors") for name in ("anchor", "trained"))
    of_anchor = weight_patch.pack(patch_between(*states)._replace(anchor=anchor))
    weight_patch.unpack(*of_anchor, run_dir / "anchored", Anchor(anchor, below))
    for which in ("best", str(run_dir / "anchored"), str(checkpoint)):
        to = run_dir / f"exported-{Path(which).name}"
        assert export.run(full, [], which=which, to=to, repository=None) == 0
        assert all(torch.equal(each, trained[name]) for name, each in load_file(to / "model.safetensors").items())
        written = AutoModelForCausalLM.from_pretrained(to)
        assert (written.dtype, written.config.use_cache) == (torch.bfloat16, True)
    for which, options, words in (
        ("best", {"is_adapter": True}, "^--adapter: "), ("last", {}, "^lora: null: .* is an adapter"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            export.run(full, [], which=which, to=run_dir / "refused", repository=None, **options)
    other = full.model_copy(update={"model": digits.model_copy(update={"path": str(run_dir / "trained")})})
    with pytest.raises(ConfigError, match=r"^model.path: .* is not the model that .* is a patch of"):
        export.run(other, [], which="best", to=run_dir / "refused", repository=None)
    patch = full.checkpoints_dir / "best" / weight_patch.FILE
    patch.write_bytes(patch.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"does not fit model.path"):
        export.run(full, [], which="best", to=run_dir / "refused", repository=None)
    assert not (run_dir / "refused").exists()
