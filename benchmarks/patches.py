"""`make bench-patches`: whole weights as patches: bytes of a version and what changes, by learning rate and step, and on paper.

Guarantee: snapshots, patches and blobs are the product's, and every blob is read back. Gradients are float32, of
SmolLM2-135M-Instruct on the example's prompts: each step takes one group of completions with signal, sampled at most a few steps
before. All learning rates share the gradients, those of the middle one's weights, and so AdamW's steps. Every finished run is a
line of `--out`, and is not repeated. Seconds are those of the CPU, of one thread.
"""

import argparse
import itertools
import os
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.finished_runs import FinishedRuns
from benchmarks.patches_report import draw, on_paper, table, versions
from benchmarks.tasks import TASKS, smollm2_easy
from benchmarks.variants import WEIGHTS
from consumer.link.weight_snapshots import WeightSnapshots
from producer.rewards.builtin import numeric_match
from protocol.runtime import json_lines
from protocol.wire.patch_streams import changes_of
from protocol.wire.weight_patch import pack, parse

OUT = Path("runs/bench/patches.jsonl")
RATES = (1e-6, 3e-6, 1e-5)
MEASURED = (1, 2, 5, 10, 20, 50, 100, 150, 200)
_GROUP, _GROUPS, _LENGTH = 6, 8, 8  # completions of a group, groups that are sampled at once, and tokens
_MAX_NORM = 1.0
_EMBEDDINGS = "embed_tokens"


class Case(NamedTuple):
    seed: int
    steps: int


class Group(NamedTuple):
    """Completions of one prompt: token ids (1, P) and (N, T), which tokens count, and advantages (N, 1)."""

    prompt: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor
    advantages: torch.Tensor


class Learner:
    """SmolLM2, which learns sums by policy gradients. Its weights are the checkpoint's and a learning rate times `_moved`,
    which is the sum of AdamW's steps at a rate of 1."""

    def __init__(self, seed: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        task = TASKS["smollm2"]
        torch.manual_seed(seed)
        self.model = AutoModelForCausalLM.from_pretrained(task.base, dtype=torch.float32)
        self._tokenizer = AutoTokenizer.from_pretrained(task.base)
        self._reward = numeric_match()
        self._rows = [row for row in json_lines.read(task.dataset) if smollm2_easy(row)]
        self._parameters = list(self.model.parameters())
        self._base = [each.detach().bfloat16() for each in self._parameters]
        self._moved = [torch.nn.Parameter(torch.zeros_like(each)) for each in self._parameters]
        self._optimizer = torch.optim.AdamW(self._moved, lr=1.0, weight_decay=0.0, fused=True)
        self.rewards: list[float] = []
        self._groups = self._with_signal()

    def step(self) -> None:
        self._loss(next(self._groups)).backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, _MAX_NORM)
        for moved, parameter in zip(self._moved, self._parameters, strict=True):
            moved.grad = parameter.grad
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        self.move_by(RATES[len(RATES) // 2])

    @torch.no_grad()
    def move_by(self, rate: float) -> None:
        """Give the model the weights of this learning rate."""
        for parameter, base, moved in zip(self._parameters, self._base, self._moved, strict=True):
            parameter.copy_(base).add_(moved, alpha=rate)

    def _loss(self, group: Group) -> torch.Tensor:
        first = self.model(group.prompt, use_cache=True, logits_to_keep=1)
        first.past_key_values.batch_repeat_interleave(len(group.tokens))
        rest = self.model(group.tokens[:, :-1], past_key_values=first.past_key_values)
        logits = torch.cat([first.logits.expand(len(group.tokens), -1, -1), rest.logits], 1)
        logprobs = logits.log_softmax(-1).gather(2, group.tokens[:, :, None]).squeeze(2)
        return -(group.advantages * logprobs)[group.counts].mean()

    def _with_signal(self) -> Iterator[Group]:
        """Yield groups whose rewards differ. Prompts of one length are sampled together."""
        by_length: dict[int, list[tuple[torch.Tensor, str]]] = defaultdict(list)
        while True:
            for number in torch.randperm(len(self._rows)).tolist():
                row = self._rows[number]
                ids = self._tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)
                waiting = by_length[len(ids["input_ids"])]
                waiting.append((torch.tensor([ids["input_ids"]]), row["answer"]))
                if len(waiting) == _GROUPS:
                    yield from self._sampled(waiting)
                    waiting.clear()

    @torch.no_grad()
    def _sampled(self, asked: list[tuple[torch.Tensor, str]]) -> Iterator[Group]:
        output = self.model(torch.cat([ids for ids, _ in asked]), use_cache=True, logits_to_keep=1)
        output.past_key_values.batch_repeat_interleave(_GROUP)
        logits, found = output.logits[:, -1].repeat_interleave(_GROUP, 0), []
        while True:
            found.append(torch.multinomial(logits.softmax(-1), 1))
            if len(found) == _LENGTH:
                break
            logits = self.model(found[-1], past_key_values=output.past_key_values).logits[:, -1]
        for (prompt, answer), tokens in zip(asked, torch.cat(found, 1).split(_GROUP), strict=True):
            has_ended = (tokens == self._tokenizer.eos_token_id).cumsum(1)
            counts = has_ended - (tokens == self._tokenizer.eos_token_id).int() == 0
            texts = self._tokenizer.batch_decode(
                [row[kept] for row, kept in zip(tokens, counts, strict=True)], skip_special_tokens=True
            )
            rewards = torch.tensor(self._reward(completions=texts, answer=[answer] * _GROUP))
            self.rewards.append(float(rewards.mean()))
            if rewards.std() > 0:
                yield Group(prompt, tokens, counts, ((rewards - rewards.mean()) / rewards.std())[:, None])


def run(case: Case) -> dict[str, Any]:
    torch.set_num_threads(1)
    learner = Learner(case.seed)
    snapshots = WeightSnapshots(learner.model)
    versions, memory, began = [], {}, time.process_time()
    for step in range(1, case.steps + 1):
        learner.step()
        for rate in RATES if step in MEASURED else ():
            learner.move_by(rate)
            versions.append({"learning_rate": rate, "step": step} | made(snapshots))
            memory[str(rate)] = memory_of_making(snapshots)
            print(versions[-1], memory[str(rate)], flush=True)
        if step in MEASURED:
            learner.move_by(RATES[len(RATES) // 2])
    return case._asdict() | {
        "versions": versions, "memory_of_making": memory,
        "num_elements": sum(parameter.numel() for parameter in learner.model.parameters()),
        "step_cpu_s": round((time.process_time() - began) / case.steps, 2),
        "reward": [round(sum(part) / len(part), 3) for part in (learner.rewards[:40], learner.rewards[-40:])],
    }  # fmt: skip


def made(snapshots: WeightSnapshots) -> dict[str, Any]:
    """Make the patch of a model's weights of now, without an anchor, and return its size and the seconds of each part."""
    times = [time.thread_time()]
    snapshot = snapshots.take()
    times.append(time.thread_time())
    data, _ = pack(snapshots.patch(snapshot.weights))
    times.append(time.thread_time())
    snapshot.release()
    patch = parse(data)
    sizes = [(tensor.name, len(places)) for tensor, places, _ in changes_of(patch)]
    times.append(time.thread_time())
    parts = [round(after - before, 4) for before, after in itertools.pairwise(times)]
    return {
        "bytes": len(data), "num_changes": sum(size for _, size in sizes),
        "num_changes_of_embeddings": sum(size for name, size in sizes if _EMBEDDINGS in name),
        **dict(zip(("take_cpu_s", "make_cpu_s", "read_cpu_s"), parts, strict=True)),
    }  # fmt: skip


def memory_of_making(snapshots: WeightSnapshots) -> int:
    """Return the most bytes beside snapshots that making a patch takes on the host."""
    snapshot = snapshots.take()
    tracemalloc.start()
    pack(snapshots.patch(snapshot.weights))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    snapshot.release()
    return peak


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=MEASURED[-1])
    parser.add_argument("--out", type=Path, default=OUT, help="file to append to")
    parser.add_argument("--plot", type=Path, help="picture to write, of all runs in --out")
    parser.add_argument("--curves", type=Path, help="file of `benchmarks.variants weights`, for the picture")
    options = parser.parse_args(argv)
    TASKS["smollm2"].build()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    runs = FinishedRuns(options.out)
    for seed in options.seeds:
        runs.make(Case(seed, options.steps), run)
    print(table(runs.lines))
    last = next(each for each in reversed(versions(runs.lines)) if each.learning_rate == RATES[0])
    print(
        f"\nSeconds with patches of learning rate {last.learning_rate:g} at step {last.step}, by producers:\n{on_paper(last)}"
    )
    if options.plot is not None:
        curves = [] if options.curves is None else json_lines.read(options.curves)
        draw(runs.lines, [one for one in curves if one["variant"] in WEIGHTS], options.plot)


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[1])
    main()
