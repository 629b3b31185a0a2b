"""A sequence-classification model as a reward, as TRL has it: the logit of its one label for prompt and completion together.

Guarantee: conversations go through the model's own chat template; texts are padded on the right and, where they are too long,
lose their beginning. A folder that is no such model is a `ConfigError`.
"""

from collections.abc import Callable
from typing import Any

from protocol.config.rewards import RewardModel
from protocol.errors import ConfigError, DeviceError, is_device_failure


def reward_model(path: str, options: RewardModel) -> Callable[..., list[float]]:
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    device = "cpu" if options.gpu is None else "cuda"  # the worker's environment shows one GPU
    try:
        labels = AutoConfig.from_pretrained(path, revision=options.revision).num_labels
        if labels != 1:
            raise ValueError(f"it has {labels} labels; a reward model has 1")
        tokenizer = AutoTokenizer.from_pretrained(path, revision=options.revision)
        model = AutoModelForSequenceClassification.from_pretrained(
            path, revision=options.revision, dtype=getattr(torch, options.dtype)
        )
        model.eval().to(device)
    except (OSError, ValueError, RuntimeError) as error:
        if is_device_failure(error):
            raise DeviceError(
                f"rewards.functions: model {path} has no room on GPU {options.gpu}, or that fails: {error}; free it of other "
                "processes, or name another one"
            ) from error
        raise ConfigError(f"rewards.functions: model {path} cannot be loaded: {error}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    tokenizer.truncation_side = "left"

    def text(prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return f"{prompt}{completion}"
        return str(tokenizer.apply_chat_template([*prompt, *completion], tokenize=False))

    def score_all(prompts: list[Any], completions: list[Any], **_columns: Any) -> list[float]:
        texts = [text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        rewards: list[float] = []
        with torch.inference_mode():
            for start in range(0, len(texts), options.batch_size):
                batch = tokenizer(
                    text=texts[start : start + options.batch_size],
                    return_tensors="pt",
                    padding=True,
                    padding_side="right",
                    truncation=True,
                    max_length=options.max_length,
                    add_special_tokens=False,
                ).to(device)
                rewards += model(**batch).logits[:, 0].float().tolist()
        return rewards

    return score_all
