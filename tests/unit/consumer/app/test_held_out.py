"""Held-out prompts are chosen as they are rendered."""

import json
from pathlib import Path

import datasets
import pytest

from consumer.app.setup import _held_out
from protocol.config.run import RunConfig
from tests.integration.models import build_model
from tests.unit.consumer.builders import run_config


def test_held_out_prompts_are_counted_with_the_templates_arguments_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    model = build_model("llama", tmp_path / "model")
    template = "{% for m in messages %}{{ m['content'] }}{% if twice %}{{ m['content'] }}{% endif %}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("a" * 7, "b" * 3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = run_config(tmp_path, model, dataset={"path": str(tmp_path / "rows.jsonl")}).model_dump(exclude_unset=True)
    values["dataset"]["chat_template_kwargs"] = {"twice": True}
    held_out = {"path": str(tmp_path / "rows.jsonl"), "max_prompt_tokens": 10}
    prompts = _held_out(RunConfig.model_validate(values | {"evaluation": {"dataset": held_out}}), model, lambda: None)
    assert prompts is not None
    assert [prompts[number][0][0]["content"] for number in range(len(prompts))] == ["bbb"]
