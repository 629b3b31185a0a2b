"""Reward models, each in a process of its own.

Guarantee: a maker returns a function with TRL's signature. It raises ConfigError for a folder that is no such model, and
DeviceError for a GPU without room. Texts are padded on the right and, where they are too long, lose their beginning.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from producer.rewards.spans import text_of
from producer.rewards.steps import as_spans, split
from protocol.config.reward_options import FeatureMatching, RewardModel, Steps
from protocol.errors import ConfigError, DeviceError, is_device_failure
from protocol.library_errors import reading
from protocol.wire.model_check import model_problems
from protocol.wire.model_source import checked


def reward_model(path: str, options: RewardModel) -> Callable[..., list[Any]]:
    """Return a sequence-classification model as a reward, as in TRL: the logit of its one label for prompt and completion. With
    `steps` return a token-classification model: the value of a label at the last token of each step, as spans.

    Conversations go through the model's own chat template.
    """
    return _step_rewards(path, options, options.steps) if options.steps else _completion_rewards(path, options)


def _completion_rewards(path: str, options: RewardModel) -> Callable[..., list[float]]:
    def check(config: Any) -> None:
        if config.num_labels != 1:
            raise ValueError(f"it has {config.num_labels} labels; a reward model has 1")

    model, tokenizer = loaded(path, options, "AutoModelForSequenceClassification", check)

    def text(prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return f"{prompt}{completion}"
        return str(tokenizer.apply_chat_template([*prompt, *completion], tokenize=False))

    def score_all(prompts: list[Any], completions: list[Any], **_columns: Any) -> list[float]:
        texts = [text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        return [float(output.logits[row, 0]) for output, row, _, _ in outputs(model, tokenizer, texts, options)]

    return score_all


def _step_rewards(path: str, options: RewardModel, steps: Steps) -> Callable[..., list[Any]]:
    def check(config: Any) -> None:
        heads = ", ".join(config.architectures or ["model without a head"])
        if not heads.endswith("ForTokenClassification"):
            raise ValueError(f"it is a {heads}; what scores steps is a ...ForTokenClassification")
        _label(config, options.label)

    model, tokenizer = loaded(path, options, "AutoModelForTokenClassification", check)
    if not tokenizer.is_fast:
        raise ConfigError(f"rewards.functions: model {path}: its tokenizer does not say where in a text its tokens are")
    label = _label(model.config, options.label)

    def begin(prompt: Any) -> str:
        if isinstance(prompt, str):
            return prompt
        return str(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False))

    def value(logits: Any) -> Any:
        if options.value == "logit":
            return logits[:, label]
        return (logits.softmax(-1) if logits.shape[-1] > 1 else logits.sigmoid())[:, label]

    def score_all(prompts: list[Any], completions: list[Any], **_columns: Any) -> list[Any]:
        ends, begins = split(completions, steps), [begin(prompt) for prompt in prompts]
        known = {row: found for row, found in enumerate(ends) if found and not isinstance(found, Exception)}
        texts = [f"{begins[row]}{text_of(completions[row])}" for row in known]
        rewards: list[list[float]] = [[] for _ in ends]
        found = outputs(model, tokenizer, texts, options)
        for row, (output, place, num_tokens, starts) in zip(known, found, strict=True):
            values = value(output.logits[place, :num_tokens].float())
            places = [bisect_left(starts, len(begins[row]) + end) - 1 for end in known[row]]
            if places[0] < 0:
                ends[row] = ValueError(f"its first step is not among the last max_length={options.max_length} tokens")
            elif not values[places].isfinite().all():
                ends[row] = ValueError("the model gave its steps a number that is not finite")
            else:
                rewards[row] = values[places].tolist()
        return as_spans(rewards, ends)

    return score_all


def _label(config: Any, label: int | str) -> int:
    """Return the index of a label from the front. Raise ValueError if there is none of that index or name."""
    names: dict[int, str] = config.id2label
    for index, name in names.items():
        if label in (name, index, index - len(names)):
            return index
    raise ValueError(f"it has no label {label!r}: {names}; set options.label")


def loaded(
    path: str, options: RewardModel | FeatureMatching, head: str, check: Callable[[Any], None]
) -> tuple[Any, Any]:
    """Return the model, ready, and its tokenizer. `check` raises ValueError for a configuration that does not fit."""
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    device = "cpu" if options.gpu is None else "cuda"  # the worker's environment shows one GPU
    what = f"rewards.functions: model {path} cannot be loaded"
    if (folder := Path(path)).is_dir():
        checked(folder, model_problems(folder), what)
    with reading(what):
        config = transformers.AutoConfig.from_pretrained(path, revision=options.revision)
    try:
        check(config)
    except ValueError as error:
        raise ConfigError(f"{what}: {error}") from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, revision=options.revision)
        model, report = getattr(transformers, head).from_pretrained(
            path, revision=options.revision, dtype=getattr(torch, options.dtype), output_loading_info=True
        )
        model.eval().to(device)
    except Exception as error:
        if is_device_failure(error):
            raise DeviceError(
                f"rewards.functions: model {path} does not fit on GPU {options.gpu}, or that GPU fails: {error}; end other "
                "processes on it, or set options.gpu to another one"
            ) from error
        with reading(what):
            raise
    if (missing := sorted(report["missing_keys"])) and head != "AutoModel":  # whose unused layers may be missing
        raise ConfigError(
            f"{what}: it lacks {missing[0]}, which transformers would draw; take all files of a reward model"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    tokenizer.truncation_side = "left"
    return model, tokenizer


def outputs(
    model: Any, tokenizer: Any, texts: list[str], options: RewardModel | FeatureMatching, **asked: bool
) -> Iterator[tuple[Any, int, int, list[int]]]:
    """Yield for each text the output of its batch, its row there, its number of tokens, and where these begin, in characters
    (empty if the tokenizer does not tell)."""
    import torch

    for start in range(0, len(texts), options.batch_size):
        batch = tokenizer(
            text=texts[start : start + options.batch_size],
            return_tensors="pt",
            return_offsets_mapping=tokenizer.is_fast,
            padding=True,
            padding_side="right",
            truncation=True,
            max_length=options.max_length,
            add_special_tokens=False,
        )
        offsets = batch.pop("offset_mapping", None)
        with torch.inference_mode():
            output = model(**batch.to(model.device), **asked)
        for row, num_tokens in enumerate(batch["attention_mask"].sum(1).tolist()):
            yield output, row, num_tokens, [] if offsets is None else offsets[row, :num_tokens, 0].tolist()
