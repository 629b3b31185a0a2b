"""`slipstream reward try`: sampled or given completions, scored by the pool that scores a run, and the report of that.

Guarantee: completions are scored as in a run, with the same workers, limits, retries and rules for missing rewards. Prompts are
those that producers would be leased; transformers samples completions with the run's settings.
"""

import asyncio
import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from consumer.prompts.completion_limit import CompletionLimit
from consumer.prompts.written import as_leased, of_json
from producer.groups import LeaseFailure
from producer.rewards.messages import Failure
from producer.rewards.pool import RewardPool, merged
from protocol.config.environments import environment_of
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, DatasetError
from protocol.wire.codec import carried
from protocol.wire.messages import Logged, RunPlan, is_conversational
from replay.advantages import weighted_sums
from replay.watches import RewardWatch
from slipstream.run_inputs import RunInputs
from slipstream.tables import printable

_PROMPT_WIDTH, _COMPLETION_WIDTH = 40, 60


@dataclass
class Group:
    """A prompt with its completions, as reward functions get them. Scoring sets `rewards`, float32 (completions, functions)
    with NaN for missing, `spans`, the ends in tokens and the rewards of each completion's spans, `problem`, the reason why
    nothing was scored, `missing`, and `logged`."""

    prompt: Any
    columns: dict[str, Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    rewards: NDArray[np.float32] = field(init=False)
    spans: Sequence[list[tuple[int, float]]] = ()
    problem: str = ""
    missing: bytes = b""  # why rewards are missing, encoded
    logged: Logged = field(default_factory=Logged)


@dataclass
class Trial:
    """The result. `failures` counts completions by function and reason; `seconds` has the time of each call by function."""

    names: tuple[str, ...]
    weights: list[float]
    groups: list[Group]
    watch: RewardWatch = field(default_factory=RewardWatch)
    credit: str = "outcome"  # `rewards.credit`: with `per_step` spans that differ are a signal, with `given` any but 0
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def reward_called(self, function: str, seconds: float) -> None:
        self.seconds[function].append(seconds)

    def reward_failed(self, function: str, reason: Failure, num_completions: int) -> None:
        self.failures[function, reason] += num_completions


def given(path: Path, tokenizer: Any) -> list[Group]:
    """The groups of a JSONL file with lines `{"prompt": ..., "completions": [...], ...columns}`, tokenized. Raises DatasetError
    if the file cannot be read, or a line is not such an object."""
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as stream:  # as a file of `dataset.path` is read
            rows = list(of_json(stream, str(path)))
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"--completions {path}: cannot be read: {error}") from error
    if not rows:
        raise DatasetError(f"--completions {path}: it has no lines")
    names = dict.fromkeys(name for _, row in rows for name in row)
    return [_given_group(names | row, place, tokenizer) for place, row in rows]


def _given_group(given: dict[str, Any], place: str, tokenizer: Any) -> Group:
    try:
        row = as_leased(given, place)
        prompt, said = row.pop("prompt"), row.pop("completions")
        if not isinstance(prompt, str) and not is_conversational(prompt):
            raise TypeError("`prompt` is neither text nor a list of messages")
        if not isinstance(said, list) or not said:
            raise TypeError("`completions` is no list of completions")
        texts = [one if isinstance(one, str) else one[-1]["content"] for one in said]
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise DatasetError(
            f'{place}: {type(error).__name__}: {error}; expected {{"prompt": "...", "completions": ["...", ...]}} and the '
            "columns that the rewards need"
        ) from error
    if not isinstance(prompt, str):
        said = [[{"role": "assistant", "content": one}] if isinstance(one, str) else one for one in said]
    return Group(prompt, row, said, ids)


def sampled(config: RunConfig, inputs: RunInputs, num_prompts: int, num_completions: int, device: str) -> list[Group]:
    """Completions of the base model for the first prompts of the dataset, with the run's sampling settings and seed. Raises
    DatasetError if the dataset or one of these prompts cannot be used."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    dataset, model = inputs.prompts(), inputs.model(device)
    prompts, stops, settings = inputs.prompt_format(), inputs.end_ids(), config.sampling
    model.generation_config.eos_token_id = sorted(stops) or None
    torch.manual_seed(config.seed)
    groups = []
    for number in range(min(num_prompts, len(dataset))):
        prompt, columns = carried(dataset[number])
        limit = CompletionLimit.of_run(settings).of(columns)
        try:
            ids = prompts.encode(prompt, limit)
        except LeaseFailure as failure:
            raise DatasetError(f"prompt {number}: {failure.detail}") from failure
        prompt_ids = torch.tensor([ids], device=device)
        with torch.inference_mode():
            sequences = model.generate(
                prompt_ids,
                attention_mask=torch.ones_like(prompt_ids),
                do_sample=True,
                num_return_sequences=num_completions,
                max_new_tokens=limit,
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                min_p=settings.min_p or None,
                pad_token_id=prompts.tokenizer.pad_token_id
                if prompts.tokenizer.pad_token_id is not None
                else min(stops, default=0),
            )
        completion_ids = []
        for tokens in sequences[:, len(ids) :].tolist():  # without the padding after the token that ends it
            end = next((place for place, token in enumerate(tokens) if token in stops), len(tokens))
            completion_ids.append(until_stop(tokens[: end + 1], settings.stop, prompts.tokenizer))
        groups.append(Group(prompt, columns, prompts.decode(prompt, completion_ids), completion_ids))
    return groups


def until_stop(tokens: list[int], stop: Sequence[str], tokenizer: Any) -> list[int]:
    """The tokens up to the one with which the first of the texts is whole."""

    def ends(length: int) -> bool:
        text = tokenizer.decode(tokens[:length])
        return any(each in text for each in stop)

    return tokens[: bisect.bisect_left(range(len(tokens)), True, key=lambda place: ends(place + 1)) + 1]


def scored(config: RunConfig, tokenizer: Any, groups: list[Group]) -> Trial:
    """Score all groups, as many at once as the workers allow. Raises ConfigError if a reward cannot be loaded, or there is
    none to try."""
    rewards = config.computed_rewards
    if not rewards.functions:
        raise ConfigError("rewards.functions: none is computed here, so there is nothing to try")
    watch = RewardWatch([(function.name, function.environments) for function in rewards.functions])
    trial = Trial(rewards.names, [function.weight for function in rewards.functions], groups, watch, rewards.credit)
    columns = tuple(dict.fromkeys(name for group in groups for name in group.columns))
    plan = RunPlan(max(1, int(config.trainer.get("max_steps", 1))), columns=columns)

    async def score(pool: RewardPool, number: int, group: Group) -> None:
        try:
            found = await pool.score(
                group.prompt, group.completions, group.completion_ids, group.columns, number=number
            )
            group.rewards, group.spans, group.logged = found.rewards, found.spans, found.logged
            group.missing = msgspec.msgpack.encode(found.failures.entries())
        except LeaseFailure as failure:
            group.rewards = np.full((len(group.completions), len(trial.names)), np.nan, np.float32)
            group.problem = failure.detail

    async def score_all() -> None:
        pool = RewardPool(rewards, trial)
        try:
            await pool.start()
            pool.begin(plan)
            pool.read_with(tokenizer, config.dataset.chat_template_kwargs)
            await asyncio.gather(*(score(pool, number, group) for number, group in enumerate(groups)))
        finally:
            await pool.close()

    asyncio.run(score_all())
    return trial


def report(trial: Trial) -> dict[str, Any]:
    """The numbers of every completion, group and reward, with NaN for what is missing, and the warnings."""
    groups, rewards, counts = [], {}, Counter[str]()
    for group in trial.groups:
        scored = None if group.problem else group.rewards
        trial.watch.note(counts, environment_of(group.columns), scored, group.missing, group.problem)
    dead = trial.watch.sentences(counts)
    warnings = [f"{name} failed to score {n} completions ({why})" for (name, why), n in sorted(trial.failures.items())]
    for number, group in enumerate(trial.groups, 1):
        totals = weighted_sums(group.rewards, np.array(trial.weights))
        known = totals[~np.isnan(totals)]
        of_spans = np.array([reward for spans in group.spans for _, reward in spans])
        compared = (known, of_spans) if trial.credit == "per_step" else (known,)
        has_signal = any(len(each) > 1 and not np.allclose(each, each[0], rtol=1e-5, atol=1e-8) for each in compared)
        if trial.credit == "given" and len(of_spans):
            has_signal = bool(of_spans.any())
        rows = [
            {"completion": completion, "rewards": dict(zip(trial.names, values, strict=True)), "sum": total}
            for completion, values, total in zip(
                group.completions, group.rewards.tolist(), totals.tolist(), strict=True
            )
        ]
        for row, spans in zip(rows, group.spans, strict=False):
            row |= {"spans": sorted(spans)} if spans else {}
        for column, texts in group.logged.extra.items():
            for row, text in zip(rows, texts, strict=True):
                row.setdefault("logged", {})[column] = text
        found = {"signal": has_signal, "problem": group.problem or None}
        groups.append({"prompt": group.prompt, "completions": rows} | found)
        if group.problem:
            warnings.append(f"group {number}: nothing was scored: {group.problem}")
        elif not len(known):
            warnings.append(f"group {number}: no reward: no function gave any completion a number")
        elif not has_signal:
            warnings.append(f"group {number}: all equal: no signal")
    of_all = np.concatenate([group.rewards for group in trial.groups]).astype(np.float64)
    for name, column in zip(trial.names, of_all.T, strict=True):
        known, calls = column[~np.isnan(column)], trial.seconds[name]
        rewards[name] = {
            "mean": float(known.mean()) if len(known) else math.nan,
            "std": float(known.std()) if len(known) else math.nan,
            "missing": len(column) - len(known),
            "failed": sum(count for (function, _), count in trial.failures.items() if function == name),
            "call_s": sum(calls) / len(calls) if calls else math.nan,
        }
        if len(known) > 1 and known.std() == 0:
            warnings.append(f"{name} is {known[0]:g} for every completion")
    if not any(group["signal"] for group in groups):
        warnings.append("no group has a signal: nothing could be learned from these completions")
    metrics = merged([group.logged for group in trial.groups]).metrics
    return {"groups": groups, "rewards": rewards, "metrics": metrics, "dead_rewards": dead, "warnings": warnings}


def show(found: dict[str, Any], console: Console) -> None:
    for sentence in found["dead_rewards"]:
        console.print(Text(sentence, style="bold red"))
    all_rows = [row for group in found["groups"] for row in group["completions"]]
    has_spans = any("spans" in row for row in all_rows)
    more = ["spans, to token"] if has_spans else []
    logged = list(dict.fromkeys(column for row in all_rows for column in row.get("logged", ())))
    headings = [Text(printable(name)) for name in (*found["rewards"], "sum", *more, *logged)]
    table = Table("prompt", "completion", *map(Column, headings), title="Completions")
    for group in found["groups"]:
        prompt = _short(group["prompt"], _PROMPT_WIDTH)
        for row in group["completions"]:
            shown = [_number(value) for value in (*row["rewards"].values(), row["sum"])]
            spans = [", ".join(f"{end}: {reward:.4g}" for end, reward in row.get("spans", ()))] if has_spans else []
            extra = [_short(row.get("logged", {}).get(column, ""), _COMPLETION_WIDTH) for column in logged]
            table.add_row(prompt, _short(row["completion"], _COMPLETION_WIDTH), *shown, *spans, *extra)
            prompt = Text("")
        table.add_section()
    console.print(table)
    summary = Table("reward", "mean", "std", "missing", "failed", "seconds per call", title="Rewards")
    for name, numbers in found["rewards"].items():
        summary.add_row(Text(name), *map(_number, numbers.values()))
    console.print(summary)
    for name, value in found["metrics"].items():
        console.print(Text(f"logged {printable(name)}: {_number(value)}"))
    for warning in found["warnings"]:
        console.print(Text(f"warning: {warning}", style="yellow"))


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}" if isinstance(value, float) else str(value)


def _short(said: Any, width: int) -> Text:
    """A text, or the content of the last message, on one line that cannot move the cursor."""
    text = said if isinstance(said, str) else str(said[-1].get("content", "")) if said else ""
    line = printable(text)
    return Text(line if len(line) <= width else f"{line[: width - 1]}…")
