"""A run as `slipstream view` finds one: journal, tokenizer, steps, timelines, evaluations, with texts of a chat model.

Guarantee: everything is a function of the numbers asked for, but for the time of arrival, which the journal says itself.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import msgpack, structs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from consumer.evaluate.kept_answers import KeptAnswer, KeptAnswers
from protocol.wire.codec import encode
from protocol.wire.messages import Group, MissingReward
from protocol.wire.model_folder import tokenizer_digest
from replay.journal.schema import DeadLetter, JournalEntry, MicroBatchPlan, RecordedBatch
from replay.journal.writer import Journal
from replay.lease_ids import Key, LeaseId
from replay.rerolls import Grade

START = 1_790_000_000.0
HOSTILE = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">\u202e é 漢"
MARKS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
MISSING = [
    MissingReward("correct", "timeout", "did not return within <b>5</b> seconds", (0,)),
    MissingReward("", "environment", "the game hung", (1,)),
]
PER_STEP, COMPLETIONS = 4, 3
_WORDS = ["apple", "pear", "plum", "fig", "lime", "melon", "grape", "date", "kiwi", "peach"]


def write_tokenizer(folder: Path) -> Tokenizer:
    """A tokenizer whose tokens are bytes, and the marks of a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(MARKS)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def prompt_text(prompt: int) -> str:
    return f"<|im_start|>user\nHow many {_WORDS[prompt % 10]}s are {prompt} and 2?<|im_end|>\n<|im_start|>assistant\n"


def completion_text(prompt: int, number: int) -> str:
    thought = f"<think>Let me count the {_WORDS[prompt % 10]}s.</think>\n"
    return thought + (HOSTILE if (prompt, number) == (3, 0) else f"There are {prompt + number}.<|im_end|>")


def message(tokenizer: Tokenizer, lease: LeaseId, version: int, rewards: list[float]) -> Group:
    """A group of `COMPLETIONS`. The log-prob of token i of a completion is -i/8, its first is not scored; the last tenth of its
    tokens are of the next version. Of the second completion the first four tokens were not sampled. Those of prompt 8 have two
    spans each: the first, up to the ninth token from the end, has reward 0, 0.5 or 1, and the second -1. Those of prompt 7 had a
    teacher, whose log-probs are all -1."""
    prompt = lease.key.prompt_id
    texts = [completion_text(prompt, number) for number in range(COMPLETIONS)]
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    logprobs = [np.arange(len(one)) / -8 for one in ids]
    sampled = [np.ones(len(one), bool) for one in ids]
    sampled[1][:4] = False
    for one, mask in zip(logprobs, sampled, strict=True):
        one[0] = np.nan
        one[~mask] = 0
    spans: dict[str, bytes] = {}
    if prompt == 8:
        credit, last = np.zeros(sum(map(len, ids)), "<f4"), np.cumsum([len(one) for one in ids]) - 1
        credit[last - 8], credit[last] = np.arange(COMPLETIONS) / 2, -1
        spans = {"credit": credit.tobytes(), "span_ends": np.isin(np.arange(len(credit)), [last - 8, last]).tobytes()}
    if prompt == 7:
        spans["teacher_logprobs"] = np.where(np.concatenate(sampled), -1, 0).astype("<f4").tobytes()
    versions = [version + (np.arange(len(one)) >= len(one) * 9 // 10) for one in ids]
    return Group(
        lease_id=str(lease),
        policy_version=version,
        prompt_ids=np.array(tokenizer.encode(prompt_text(prompt), add_special_tokens=False).ids, "<i4").tobytes(),
        completion_lengths=np.array([len(one) for one in ids], "<i4").tobytes(),
        completion_ids=np.concatenate([*map(np.array, ids)]).astype("<i4").tobytes(),
        logprobs=np.concatenate(logprobs).astype("<f4").tobytes(),
        rewards=np.array(rewards, "<f4").tobytes(),
        truncated=bytes([int(prompt % 5 == 0), 0, 0]),
        generation_s=0.5,
        reward_s=0.25,
        token_versions=np.concatenate(versions).astype("<i4").tobytes(),
        sampled=np.concatenate(sampled).astype("u1").tobytes(),
        **spans,
    )


def entries(tokenizer: Tokenizer, num_groups: int, num_prompts: int) -> Iterator[JournalEntry]:
    """Group n answers prompt n modulo `num_prompts` in epoch n // `num_prompts`, with version n // 4. Every seventh has no
    signal, and every eleventh nothing was scored for, of which `MISSING` says why."""
    for number in range(num_groups):
        epoch, prompt = divmod(number, num_prompts)
        lease = LeaseId(Key(epoch, prompt, 0), 1, "s")
        version = number // PER_STEP
        solved = min(COMPLETIONS, number * (COMPLETIONS + 1) // num_groups) if number % 7 else 0
        rewards = [float(index < solved) for index in range(COMPLETIONS)]
        grade = Grade("mixed" if solved else "failed", COMPLETIONS, solved)
        reward: float | None = solved / COMPLETIONS
        if number % 11 == 10:
            rewards, grade, reward = [float("nan")] * COMPLETIONS, Grade("unscored", 0, 0), None
        frame = encode(group := message(tokenizer, lease, version, rewards))
        yield JournalEntry(
            lease, f"producer-{number % 2}", version, "accepted" if number % 7 else "no_signal", reward, grade,
            len(group.completion_ids) // 4, frame, msgpack.encode(MISSING) if reward is None else b"",
        )  # fmt: skip


def facts(folder: Path) -> dict[str, str]:
    return {
        "run_id": "view", "model_path": str(folder), "tokenizer_digest": tokenizer_digest(folder),
        "reward_names": '["correct"]', "reward_weights": "[1.0]", "num_iterations": "1", "groups_per_step": str(PER_STEP),
        "credit": '{"unit": "per_step", "gamma": 0.5, "outcome_weight": 1.0}',
        "num_generations": str(COMPLETIONS), "sampling": '{"temperature": 1.0}',
    }  # fmt: skip


def write_run(folder: Path, num_groups: int = 120, num_prompts: int = 40) -> Path:
    """A finished run of `num_groups` groups; returns its folder."""
    run, model = folder / "run", folder / "model"
    tokenizer = write_tokenizer(model)
    run.mkdir(parents=True, exist_ok=True)
    with closing(Journal(run / "journal.sqlite")) as journal:
        journal.note_facts(facts(model))
        journal.note_policy(0, 0, "0" * 64)
        made = list(entries(tokenizer, num_groups, num_prompts))
        journal.append(made)
        trainable = [entry.lease_id for entry in made if entry.outcome == "accepted" and entry.reward is not None]
        for step in range(1, len(trainable) // PER_STEP):
            take_step(journal, run, step, trainable[(step - 1) * PER_STEP : step * PER_STEP])
        journal.add_dead_letter(DeadLetter(0, 3, 1, 3, "data", "reward_failed", "<b>the reward raised</b>"))
    for step in (9, 10):
        place = run / "checkpoints" / f"checkpoint-{step}"
        place.mkdir(parents=True)
        (place / "pipeline_state.json").write_text(json.dumps({"step": step, "run_id": "view"}))
        (place / "adapter_config.json").write_text("{}")
    write_timeline(run, num_steps=len(trainable) // PER_STEP)
    lines = [
        {"version": v, "step": v, "score": v / 20, "num_prompts": 8, "num_scored": 8, "metric": "correct"}
        for v in (4, 12)
    ]
    _append(run / "evaluations.jsonl", *lines)
    for version in (4, 12):
        KeptAnswers(run, 1000).write(version, version, list(held_out(tokenizer, version)))
    line = {"step": 1, "group": trainable[0], "advantage": -1.25, "reward": 0.0, "prompt": "p", "completion": "c"}
    _append(run / "rollouts.jsonl", line)
    return run


def held_out(tokenizer: Tokenizer, version: int) -> Iterator[KeptAnswer]:
    """Eight prompts, of which the last one was given up. Version 4 solves 0 to 3, version 12 solves 2 to 6; of prompt 5 no text
    is kept."""
    for prompt in range(8):
        score = float(prompt < 4 if version == 4 else 2 <= prompt < 7)
        group = message(tokenizer, LeaseId(Key(0, prompt, 0), 1, "s"), version, [score] * COMPLETIONS)
        frame = encode(structs.replace(group, lease_id=f"evaluation-{version}-{prompt}-1-s"))
        yield KeptAnswer(prompt, None) if prompt == 7 else KeptAnswer(prompt, score, b"" if prompt == 5 else frame)


def take_step(journal: Journal, run: Path, step: int, lease_ids: list[str]) -> None:
    """Step `step` trains these groups and makes a policy; it takes 1.5 s after 0.5 s of waiting."""
    journal.claim(RecordedBatch(step, step, lease_ids, len(lease_ids)))
    advantages = (np.arange(len(lease_ids) * COMPLETIONS) / step).astype("<f4").tobytes()
    journal.end_step(step, MicroBatchPlan(step, 64, None, advantages if step > 10 else b""))
    journal.note_policy(step, step, f"{step:064x}")
    _append(run / "steps.jsonl", step_line(step))


def step_line(step: int) -> dict[str, Any]:
    """Return the line of a step; those before step 11 have no loss."""
    losses = {"loss": -1 / step, "grad_norm": 0.5} if step > 10 else {}
    return losses | {
        "step": step, "t": START + 2 * step, "wait_s": 0.5, "step_s": 1.5, "tokens": 400, "reward": 1 - 1 / step,
        "entropy": 1 / step, "staleness/mean": 0.5, "staleness/max": 1.0, "replay/share": 0.0,
        "sampling/importance_sampling_ratio/effective_sample_share": 0.99, "sampling/importance_sampling_ratio/kl": 0.001,
        "frac_reward_zero_std": None, "policy_version": float(step - 1),
    }  # fmt: skip


def write_timeline(run: Path, num_steps: int) -> None:
    """Producer 0 is busy for three quarters of every second, and takes each version in 0.2 s."""
    events: list[dict[str, Any]] = [{"t": START, "event": "start", "name": "producer-0", "engine_start_s": 1.0}]
    events += [
        {"t": START + second, "event": "stats", "tokens": 100 * second, "busy_s": 0.75 * second, "idle_s": 0.0}
        for second in range(1, 2 * num_steps + 2)
    ]
    phases = {"ms": 200.0, "load_ms": 150.0, "probe_ms": 20.0, "probe_difference": 2.5e-7}
    events += [{"t": START + 2 * n + 0.2, "event": "swap", "version": n} | phases for n in range(num_steps)]
    events.append({"t": START + 5, "event": "swap_refused", "version": 2, "reason": "<i>the probe differs</i>"})
    _append(run / "producer-producer-0.jsonl", *sorted(events, key=lambda event: event["t"]))


def _append(path: Path, *lines: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)
