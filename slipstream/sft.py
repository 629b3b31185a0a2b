"""`slipstream sft` trains a supervised warm start from the run's own configuration and dataset, with TRL's SFTTrainer.

Guarantee: the result is a plain PEFT adapter with the run's `lora` settings, which `lora.init_from` takes, or with `lora: null` a
model, which `model.path` takes. It appears whole and on the disk. A training that was cut off goes on from its last checkpoint,
to the same weights. Every option of `trl.SFTConfig` that is not refused is TRL's
own; only the completions count in the loss unless `sft.completion_only_loss` is set otherwise.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import datasets
from datasets import Dataset, Features, Json, Value
from peft import LoraConfig
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import logging as transformers_logging

from consumer.learn import checkpoints
from consumer.learn.adapters import AdapterFolder
from consumer.learn.model import (
    check_base_fits,
    choose_trainable,
    device_map,
    loading,
    outline,
    save_weights,
    within_text_model,
)
from consumer.learn.options import build_lora, casts, former_names
from consumer.link.merging import widen_saved_modules
from consumer.prompts.answer_text import answer_text
from consumer.prompts.tokenizer import load_tokenizer
from protocol.command_line import print_progress
from protocol.config.library_section import build, for_library
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, DatasetError, DeviceError, ExitCode
from protocol.gpu.memory import base_of
from protocol.runtime import logs
from protocol.runtime.processes import block_import
from protocol.wire.messages import is_conversational
from slipstream.new_folder import new_folder
from slipstream.run_inputs import RunInputs

with block_import("vllm"):
    from trl import SFTConfig

    from consumer.learn.rotary import follow_engine
from consumer.learn.warm_start import WarmStartTrainer

logger = logging.getLogger(__name__)

_LARGER = "take a GPU with more memory, or --gpu cpu"
_LOGS = ("save_", "logging_", "report_to", "run_name")  # keys of `sft` by which no weight changes begin so


def run(config: RunConfig, gpus: list[int], *, to: Path, resume: bool = False) -> ExitCode:
    """Write the adapter, or the model, to the new folder `to`, or raises a `SlipstreamError`.

    Args:
        resume: go on from the last checkpoint of a training that was cut off.
    """
    if len(gpus) > 1:
        # transformers would copy the model to all of them in every step (DataParallel), which PEFT does not support.
        named = ",".join(map(str, gpus))
        raise DeviceError(f"--gpu {named}: slipstream sft, a short warm start, trains on one GPU; name one of them")
    logs.adopt_libraries()
    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
    kept = to.with_name(f"{to.name}-checkpoints")
    with new_folder(to) as partial, _unless_needed(kept):
        lora, arguments = _lora_of(config), build_sft_arguments(config, kept, on_gpu=bool(gpus))
        inputs = RunInputs(config)
        if gpus:
            check_base_fits(base_of(inputs.model_folder, config.trainer_dtype, None), _LARGER)
        prompts = inputs.prompts()
        given = list(training_rows(prompts, config.sft))
        rows, digest = _as_dataset(given), _digest(config, inputs.model_folder, given)
        check_thoughts(rows, prompts, inputs.tokenizer(), config)
        if config.dataset.chat_template_kwargs:
            rows = rows.add_column("chat_template_kwargs", [config.dataset.chat_template_kwargs] * len(rows))
        newest = _starting_point(kept, digest, resume=resume)
        print_progress(f"slipstream sft: {len(rows)} rows")
        trained = train(config, inputs.model_folder, arguments, lora, rows, digest, newest)
        if lora is None:
            save_weights(trained, inputs.tokenizer(), str(partial))
        else:
            trained.save_pretrained(partial)
            AdapterFolder.read(partial, "slipstream sft")
    shutil.rmtree(kept, ignore_errors=True)
    key = "model.path" if lora is None else "lora.init_from"
    print_progress(f"slipstream sft: wrote {to}; start from it with --set {key}={to}")
    return ExitCode.OK


def _digest(config: RunConfig, model_folder: Path, rows: list[dict[str, Any]]) -> str:
    """Name all of which the weights are made."""
    options = {key: value for key, value in config.sft.items() if not key.startswith(_LOGS)}
    of_config = (
        options,
        config.lora,
        config.trainable,
        config.seed,
        config.trainer_dtype,
        config.dataset.chat_template_kwargs,
    )
    told = json.dumps([str(model_folder), *of_config, rows], sort_keys=True, default=str)
    return hashlib.sha256(told.encode()).hexdigest()


def _starting_point(kept: Path, digest: str, *, resume: bool) -> Path | None:
    newest = checkpoints.latest(kept)
    if newest is None:
        if resume:
            raise ConfigError(
                f"--resume: there is no checkpoint in {kept}; start without --resume (sft.save_steps: how often)"
            )
        return None
    if not resume:
        raise ConfigError(
            f"--to: {kept} has {newest.folder.name} of a training that was cut off; --resume goes on, or remove it"
        )
    if newest.run_id != digest:
        raise ConfigError(
            f"--resume: {newest.folder} was made of other rows or of another model, lora, sft, trainable or seed; go on with "
            f"those, or remove {kept}"
        )
    print_progress(f"slipstream sft: goes on after step {newest.step}")
    return newest.folder


@contextmanager
def _unless_needed(kept: Path) -> Iterator[None]:
    """Remove the folder at the end if no checkpoint is in it."""
    try:
        yield
    finally:
        if checkpoints.latest(kept) is None:
            shutil.rmtree(kept, ignore_errors=True)


def _lora_of(config: RunConfig) -> LoraConfig | None:
    if config.lora is None and config.sft.get("loraplus_lr_ratio") is not None:
        raise ConfigError("sft.loraplus_lr_ratio: with `lora: null` there is no adapter; remove it")
    if config.changes_base:
        raise ConfigError(
            f"lora.init_lora_weights: {config.lora_section['init_lora_weights']}: no run starts from an adapter that is of a "
            "base from which PEFT took a part; train another one here, or `lora: null`"
        )
    return build_lora(config)


def build_sft_arguments(config: RunConfig, output_dir: Path, *, on_gpu: bool) -> SFTConfig:
    """`ConfigError` if TRL does not know a key or refuses a value."""
    chosen = for_library("sft", config.sft)
    options = chosen.pop("model_init_kwargs", None) or {}
    if not isinstance(options, dict):
        raise ConfigError(f"sft.model_init_kwargs: expected a mapping (got {options!r})")
    order = "random" if config.dataset.shuffle else "sequential"
    defaults = {"report_to": "none", "bf16": casts(config, chosen, on_gpu=on_gpu), "train_sampling_strategy": order}
    with former_names():
        return build(
            "sft",
            SFTConfig,
            defaults | chosen,
            output_dir=str(output_dir),
            seed=config.seed,
            trust_remote_code=config.model.trust_remote_code,
            use_cpu=not on_gpu,
            save_strategy="steps",
            disable_tqdm=True,
            model_init_kwargs={"dtype": config.trainer_dtype}
            | options
            | {"device_map": device_map("own", on_gpu=on_gpu)},
        )


def train(
    config: RunConfig,
    folder: Path,
    arguments: SFTConfig,
    lora: LoraConfig | None,
    rows: Dataset,
    digest: str,
    start: Path | None,
) -> Any:
    """Return the model with the trained adapter, or without `lora` the model, whose parameters `trainable` names were trained;
    `ConfigError` if TRL or PEFT refused. The rows have `prompt` and `completion`, and perhaps `chat_template_kwargs`.

    Args:
        folder: of the model.
        digest: what the rows and settings are called in checkpoints.
        start: a checkpoint to go on from.
    """
    trusted = arguments.trust_remote_code
    with loading("TRL or PEFT refused to build the trainer", _LARGER):
        if lora is not None:
            lora = within_text_model(lora, outline(folder, trust_remote_code=trusted))
        trainer = WarmStartTrainer(
            loraplus_lr_ratio=config.sft.get("loraplus_lr_ratio"),
            inputs=digest,
            model=str(folder),
            args=arguments,
            train_dataset=rows,
            processing_class=load_tokenizer(folder, trust_remote_code=trusted),
            peft_config=lora,
            callbacks=[_Lines()],
        )
    follow_engine(trainer.model, config)
    if lora is None:
        choose_trainable(trainer.model, config.trainable)
    else:
        widen_saved_modules(trainer.model)
    trainer.remove_callback(PrinterCallback)
    if arguments.packing:
        print_progress(
            f"slipstream sft: packed in {len(trainer.train_dataset)} sequences of at most {arguments.max_length} tokens; "
            f"a step has {trainer.rows_per_step:.3g} rows on average"
        )
    trainer.train(resume_from_checkpoint=None if start is None else str(start))
    return trainer.accelerator.unwrap_model(trainer.model)


class _Lines(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            accuracy = f"  token accuracy {logs['mean_token_accuracy']:.3f}" if "mean_token_accuracy" in logs else ""
            print_progress(f"step {state.global_step}/{state.max_steps}  loss {float(logs['loss']):.4f}{accuracy}")


def _as_dataset(rows: list[dict[str, Any]]) -> Dataset:
    """Keep messages as JSON: Arrow would give each of them the keys of all others."""
    kind = Value("string") if isinstance(rows[0]["prompt"], str) else Json()
    return Dataset.from_list(rows, Features({"prompt": kind, "completion": kind}))


class Prompts(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, prompt_id: int) -> tuple[Any, dict[str, Any]]: ...

    def place(self, prompt_id: int) -> str: ...


def training_rows(prompts: Prompts, section: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows `{"prompt": ..., "completion": ...}` for TRL, as the section `sft` says; `DatasetError` if a row has no completion,
    or one of another form than its prompt or the rows before."""
    form: type | None = None
    for prompt_id in range(len(prompts)):
        prompt, columns = prompts[prompt_id]
        where = prompts.place(prompt_id)
        if section.get("messages_column"):
            prompt, completion = _cut(columns, section["messages_column"], where)
        else:
            completion = _completion(prompt, columns, section.get("completion_column") or "completion", where)
        if form is not None and type(prompt) is not form:
            raise DatasetError(f"{where}: rows before have prompts of another form; text and messages cannot be mixed")
        form = type(prompt)
        yield {"prompt": prompt, "completion": completion}


def check_thoughts(rows: Iterable[dict[str, Any]], prompts: Prompts, tokenizer: Any, config: RunConfig) -> None:
    """Warn of the first row whose completion the chat template keeps out of the thought that it opens or writes, and of a model
    that thinks if no row has a thought."""
    template, tags = config.dataset.chat_template_kwargs, config.rewards.thinking
    for prompt_id, row in enumerate(rows):
        last = row["completion"][-1]
        if isinstance(last, dict) and len(row["completion"]) == 1 and isinstance(last["content"], str):
            try:
                answer_text(tokenizer, row["prompt"], last["content"], template, tags)
            except DatasetError as error:
                logger.warning("%s: %s. There may be others like it", prompts.place(prompt_id), error)
                return
            except Exception:  # what a chat template raises, which TRL reports
                return
    source, told = (
        str(tokenizer.chat_template),
        [row["completion"] for row in rows if isinstance(row["completion"], list)],
    )
    thinks = template.get("enable_thinking") is not False and ("enable_thinking" in source or tags.open in source)
    has_thoughts = any(tags.close in str(completion) or "'reasoning" in str(completion) for completion in told)
    if told and thinks and not has_thoughts:
        logger.warning(
            "the model thinks before it answers (its chat template says so), and no completion has a thought that ends with "
            "%r (rewards.thinking.close): it would learn not to think. Write thoughts into the completions, or set "
            "dataset.chat_template_kwargs: {enable_thinking: false}",
            tags.close,
        )


def _cut(columns: dict[str, Any], name: str, where: str) -> tuple[Any, Any]:
    messages = columns.get(name)
    if messages is None or not is_conversational(messages) or len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise DatasetError(
            f"{where}: sft.messages_column: {name!r} must be a list of messages that ends with the assistant's, got "
            f"{messages!r:.80}"
        )
    return messages[:-1], messages[-1:]


def _completion(prompt: Any, columns: dict[str, Any], name: str, where: str) -> Any:
    if name not in columns:
        raise DatasetError(
            f"{where}: sft.completion_column: there is no column {name!r}; beside the prompt there are "
            f"{', '.join(map(repr, columns)) or 'none'}"
        )
    completion = columns[name]
    if isinstance(completion, str) and completion:
        return completion if isinstance(prompt, str) else [{"role": "assistant", "content": completion}]
    if is_conversational(completion) and not isinstance(prompt, str):
        return completion
    form = "a text" if isinstance(prompt, str) else "a text or a list of messages"
    raise DatasetError(
        f"{where}: sft.completion_column: {name!r} must be {form} that is not empty, got {completion!r:.80}"
    )
