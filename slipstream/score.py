"""`slipstream score` writes the log-probs of given rows under a policy that a run has kept.

Guarantee: the policy is the trainer's: its model, quantization and types, its forward pass, at `sampling.temperature`, without
dropout. Equal rows give equal numbers up to rounding, whatever stands beside them. The file appears whole or not at all.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from consumer.learn.adapters import AdapterFolder
from consumer.learn.checkpoints import CONFIG_FILE
from consumer.learn.micro_batches import MicroBatch
from consumer.learn.model import loading
from consumer.learn.options import build_arguments, build_lora
from consumer.learn.row_splits import Sizes, split_rows
from consumer.learn.trainer import SlipstreamTrainer
from consumer.link.merging import load_beginning
from consumer.prompts.answers import answer_token_ids
from consumer.prompts.written import of_json
from protocol.command_line import print_progress
from protocol.config.learning import FIRST_TOKENS
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, DatasetError, DeviceError, ExitCode
from protocol.runtime.files import staged
from protocol.runtime.json_lines import encode_line
from protocol.wire import weight_patch
from protocol.wire.messages import is_conversational, prompt_token_ids
from slipstream.adapters import choose_adapter
from slipstream.run_inputs import RunInputs

BASE = "base"
_FORM = '{"prompt": ..., "completion": ...} as text or messages, or {"prompt_ids": [...], "completion_ids": [...]}'


class Row(NamedTuple):
    prompt_ids: list[int]
    completion_ids: list[int]


def run(config: RunConfig, gpus: list[int], *, which: str, rows_file: Path, to: Path) -> ExitCode:
    """Write `to`. Raises a SlipstreamError if there is no such policy, or a row cannot be read."""
    if len(gpus) > 1:
        raise DeviceError(f"--gpu {','.join(map(str, gpus))}: slipstream score computes on one GPU; name one of them")
    inputs = RunInputs(config)
    rows = list(read_rows(rows_file, inputs.tokenizer(), config))
    folder = None if which == BASE else choose_adapter(Path(config.run_dir), which)
    trainer = policy_of(config, inputs.model_folder, folder, on_gpu=bool(gpus))
    vocabulary = trainer.base.get_input_embeddings().num_embeddings
    for number, row in enumerate(rows, start=1):
        if not all(0 <= token < vocabulary for token in row.prompt_ids + row.completion_ids):
            raise DatasetError(
                f"--rows {rows_file}: row {number} has a token that the model's {vocabulary} embeddings lack"
            )
    setting, total, num_tokens = config.pipeline.trainer_tokens_per_micro_batch, 0.0, 0
    max_tokens = FIRST_TOKENS if setting == "auto" else setting
    with staged(to) as partial, partial.open("w", encoding="utf-8") as stream:
        for row, logprobs in zip(rows, score(trainer, rows, max_tokens), strict=True):
            total, num_tokens = total + sum(logprobs), num_tokens + len(logprobs)
            numbers = {"sum": sum(logprobs), "mean": sum(logprobs) / len(logprobs), "num_tokens": len(logprobs)}
            stream.write(encode_line(numbers | {"token_ids": row.completion_ids, "logprobs": logprobs}) + "\n")
    print_progress(f"slipstream score: {to}: {len(rows)} rows of {folder or BASE}, loss {-total / num_tokens:.6f}")
    return ExitCode.OK


def read_rows(file: Path, tokenizer: Any, config: RunConfig) -> Iterator[Row]:
    """Yield the rows of a JSONL file, tokenized as a run does. Raises DatasetError for one without prompt or completion."""
    try:
        with file.open(encoding="utf-8-sig", newline="\n") as stream:
            rows = list(of_json(stream, str(file)))
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"--rows {file}: cannot be read: {error}") from error
    if not rows:
        raise DatasetError(f"--rows {file}: it has no lines")
    for place, row in rows:
        try:
            found = _row(row, tokenizer, config)
        except Exception as error:  # a chat template raises what it likes
            raise DatasetError(f"{place}: {type(error).__name__}: {error}; expected {_FORM}") from error
        if not found.prompt_ids or not found.completion_ids:
            raise DatasetError(f"{place}: prompt and completion have at least one token each")
        yield found


def _row(row: dict[str, Any], tokenizer: Any, config: RunConfig) -> Row:
    if "completion_ids" in row:
        ids = row["prompt_ids"], row["completion_ids"]
        if not all(isinstance(tokens, list) and all(type(token) is int for token in tokens) for tokens in ids):
            raise TypeError("token ids are lists of whole numbers")
        return Row(*ids)
    prompt, completion, template = row["prompt"], row["completion"], config.dataset.chat_template_kwargs
    prompt_ids = prompt_token_ids(tokenizer, prompt, template)
    if isinstance(completion, str):
        return Row(prompt_ids, tokenizer(text=completion, add_special_tokens=False)["input_ids"])
    if not is_conversational(completion) or len(completion) != 1 or isinstance(prompt, str):
        raise TypeError("`completion` is neither text nor, behind messages, the assistant's message")
    content = completion[0]["content"]
    return Row(prompt_ids, answer_token_ids(tokenizer, prompt, prompt_ids, content, template, config.rewards.thinking))


def policy_of(config: RunConfig, model_folder: Path, folder: Path | None, *, on_gpu: bool) -> SlipstreamTrainer:
    """Return a trainer whose model is the policy in this folder; None: the base model. Raises ConfigError if it does not fit."""
    config = config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"gpu": "own"})})
    arguments = build_arguments(config, on_gpu=on_gpu, num_prompts=config.pipeline.groups_per_step)
    trainer = SlipstreamTrainer(
        config, arguments, build_lora(config), model_folder, [], lambda step, staged, write: write()
    )
    if folder is not None and (folder / weight_patch.FILE).is_file():
        raise ConfigError(
            f"{folder}: it was kept as it travelled, as a patch of the weights; name a checkpoint, or `last`"
        )
    if folder is not None and config.lora is None:
        if (folder / CONFIG_FILE).is_file():
            raise ConfigError(f"lora: null: {folder} is an adapter; give the configuration that it was trained with")
        with loading(f"{folder} does not fit model.path"):
            trainer._load_from_checkpoint(str(folder))
    elif folder is not None:
        if config.changes_base:
            load_beginning(trainer.model, folder)
        AdapterFolder.read(folder, "--policy").load_into(trainer.model)
    elif config.lora is not None and not config.changes_base:
        trainer.model.base_model.disable_adapter_layers()
    trainer.model.eval()
    return trainer


def score(trainer: SlipstreamTrainer, rows: list[Row], max_tokens: int) -> list[list[float]]:
    """Return the log-prob of each token of each completion, by passes of at most so many tokens, or of one row."""
    result: list[list[float]] = [[]] * len(rows)
    lengths = [len(row.prompt_ids) + len(row.completion_ids) for row in rows]
    for part in split_rows(Sizes(lengths), max_tokens):
        with torch.no_grad():
            found = trainer.forward_pass(_batch([rows[number] for number in part])).logprobs.double().tolist()
        for number, logprobs in zip(part, found, strict=True):
            result[number] = logprobs[: len(rows[number].completion_ids)]
    return result


def _batch(rows: list[Row]) -> MicroBatch:
    """Return left-padded prompts and right-padded completions, all in the loss."""
    width, longest = (max(map(len, ids)) for ids in zip(*rows, strict=True))
    prompts = [[0] * (width - len(row.prompt_ids)) + row.prompt_ids for row in rows]
    completions = [row.completion_ids + [0] * (longest - len(row.completion_ids)) for row in rows]
    of_prompt = [[0] * (width - len(row.prompt_ids)) + [1] * len(row.prompt_ids) for row in rows]
    of_completion = [[1] * len(row.completion_ids) + [0] * (longest - len(row.completion_ids)) for row in rows]
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    return dict(zip(names, map(torch.tensor, (prompts, of_prompt, completions, of_completion)), strict=True))
