"""The tasks that benchmarks of whole runs learn: the demo's sums, six digits of a model of its kind, three of
SmolLM2-135M-Instruct, sums and two sparse ones, and the calculator, in two turns.

Guarantee: model, prompts, reward, batch, LoRA, optimizer and sampling are those of a configuration. Accuracy is held out, and
greedy: only that of least common multiples is of samples, because greedy it stays at 0.26 from the first step on.
"""

import functools
import itertools
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from consumer.prompts.dataset import PromptDataset
from consumer.prompts.generated import with_rows
from examples.arithmetic import demo as sums
from examples.folders import build_once
from examples.smollm2 import demo as smollm2
from producer.rewards import builtin
from protocol.config.functions import load_function
from protocol.config.loader import load_config
from protocol.config.reward_options import SHIPPED

_CHATML = "<|im_start|>assistant\n", r"<\|im_end\|>"
_LCM = "What is the least common multiple of {} and {}? Answer with the number alone."
_TIMES = "You are a calculator. Write the result after an equals sign.", "What is {} times {}?"
_HELD_OUT = 100
_DIGITS = Path("runs/digits-base")
_CALCULATOR = Path("runs/calculator-base")
_TEXT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class Task(NamedTuple):
    """An example that can be run.

    Args:
        rows: the file in `base` with the prompts to train.
        template: the chat template that TRL's asynchronous trainer needs, which takes messages alone; None for the model's own.
        start, end: the last text before an answer, and a pattern of what ends it.
        goals: accuracies to which costs are compared: about half of what is learned, and near the end.
    """

    config: str
    base: Path
    build: Callable[[], None]
    accuracy: Callable[[Path | None], float]
    template: str | None
    start: str
    end: str
    rows: str = "train.jsonl"
    goals: tuple[float, ...] = ()

    @property
    def dataset(self) -> Path:
        return self.base.absolute() / self.rows

    def tell_template(self, tokenizer: Any) -> None:
        """Tell a tokenizer how TRL's asynchronous trainer makes prompts and finds answers."""
        tokenizer.chat_template = self.template or tokenizer.chat_template
        field = {"close_pattern": rf"{self.end}\s*", "content": "text"}
        tokenizer.response_template = {
            "defaults": {"role": "assistant"},
            "start_anchor": self.start,
            "fields": {"content": field},
        }


@functools.cache
def reward_of(config_file: str) -> Callable[..., Any]:
    """Load the only reward of a configuration. It takes completions as texts."""
    config = load_config(config_file)
    (chosen,) = config.rewards.functions
    name = str(chosen.function)
    if name in SHIPPED:
        return getattr(builtin, name)(**chosen.options)
    place, _, function = name.rpartition(":")
    return load_function(f"{Path(config.folder) / place}:{function}", "rewards")


def sums_easy(row: dict[str, Any]) -> bool:
    """Return whether the sum has no carry from its last digits: a filter of rows."""
    first, second = row["prompt"].rstrip("=").split("+")
    return int(first[-1]) + int(second[-1]) < 10


def sums_hard(row: dict[str, Any]) -> bool:
    return not sums_easy(row)


def smollm2_easy(row: dict[str, Any]) -> bool:
    """Return whether both numbers have one digit: a filter of rows."""
    return not re.search(r"\d\d", row["prompt"][0]["content"])


def smollm2_hard(row: dict[str, Any]) -> bool:
    return not smollm2_easy(row)


def lcm_easy(row: dict[str, Any]) -> bool:
    """Return whether one number is the answer: a filter of rows."""
    return row["answer"] in re.findall(r"\d+", row["prompt"][-1]["content"])


def lcm_hard(row: dict[str, Any]) -> bool:
    return not lcm_easy(row)


def times_easy(row: dict[str, Any]) -> bool:
    """Return whether both factors have one digit: a filter of rows."""
    return not re.search(r"\d\d", row["prompt"][-1]["content"])


def times_hard(row: dict[str, Any]) -> bool:
    return not times_easy(row)


def _base_and_adapter(base: Path, trained: Path | None) -> tuple[Path, Path | None]:
    """Return the model of a checkpoint, which is one itself or an adapter of `base`, and the adapter."""
    return (base, trained) if trained is None or (trained / "adapter_config.json").exists() else (trained, None)


def _greedy_accuracy(base: Path, trained: Path | None, **given: int) -> float:
    from examples.arithmetic.evaluate import greedy_accuracy

    model, adapter = _base_and_adapter(base, trained)
    return greedy_accuracy(model, base / "eval.jsonl", adapter, **given)


def _build_by(module: str, base: Path) -> None:
    """Build a model by a module that takes the folder, unless it is there."""
    recipe = (Path(__file__).parents[1] / module.replace(".", "/")).with_suffix(".py").read_bytes()
    build_once(base, recipe, lambda folder: subprocess.run([sys.executable, "-m", module, str(folder)], check=True))


def _calculator_accuracy(trained: Path | None) -> float:
    from examples.calculator.evaluate import greedy_accuracy

    model, adapter = _base_and_adapter(_CALCULATOR, trained)
    return greedy_accuracy(model, _CALCULATOR / "eval.jsonl", adapter)[1]


def _build_smollm2() -> None:
    smollm2.build_base_model()
    write_rows(smollm2.BASE)


def write_rows(folder: Path) -> None:
    """Write the rows of SmolLM2's example as files, which TRL's trainer reads too."""
    config = with_rows(load_config(smollm2.CONFIG, [f"run_dir={folder}"]))
    assert config.evaluation is not None
    for name, section in (("train", config.dataset), ("eval", config.evaluation.dataset)):
        prompts = PromptDataset(section)
        rows = ({"prompt": prompts[each][0], "answer": prompts[each][1]["answer"]} for each in range(len(prompts)))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _build_lcm() -> None:
    """Write questions for a least common multiple, on which SmolLM2 is right once in fifty samples."""
    import reasoning_gym

    smollm2.build_base_model()
    items = reasoning_gym.create_dataset(
        "lcm", size=3000, seed=1, min_numbers=2, max_numbers=2, min_value=1, max_value=20
    )
    asked = {tuple(item["metadata"]["numbers"]): item["answer"] for item in items}
    rows = [
        {"prompt": [{"role": "user", "content": _LCM.format(*numbers)}], "answer": answer}
        for numbers, answer in asked.items()
    ]
    _write("lcm", rows[:_HELD_OUT], rows[_HELD_OUT:])


def _build_times() -> None:
    """Write products of 2 to 12 behind a system prompt, on which SmolLM2 is right once in 14 samples. Held out are 20 pairs of
    factors, in both orders."""
    smollm2.build_base_model()
    _write("times", *times_rows())


def times_rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows that are held out, and those to train."""
    system, question = _TIMES
    pairs = list(itertools.combinations_with_replacement(range(2, 13), 2))
    random.Random(1).shuffle(pairs)
    held_out = [pair for pair in pairs if pair[0] != pair[1]][:20]

    def row(first: int, second: int) -> dict[str, Any]:
        messages = [("system", system), ("user", question.format(first, second))]
        prompt = [{"role": role, "content": text} for role, text in messages]
        return {"prompt": prompt, "answer": str(first * second)}

    parts = held_out, [pair for pair in pairs if pair not in held_out]
    evaluated, trained = ([row(*one) for pair in part for one in sorted({pair, pair[::-1]})] for part in parts)
    return evaluated, trained


def _write(task: str, evaluated: list[dict[str, Any]], trained: list[dict[str, Any]]) -> None:
    for name, rows in (("eval", evaluated), ("train", trained)):
        (smollm2.BASE / f"{task}-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@functools.cache
def _smollm2() -> tuple[Any, Any]:
    """Load the base and its tokenizer, once for all adapters that are evaluated."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2.BASE, padding_side="left")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(smollm2.BASE, dtype=torch.float32).to(device).eval(), tokenizer


def _smollm2_accuracy(rows_file: str, trained: Path | None, samples: int = 0) -> float:
    """Return the share of right answers by the example's own reward: greedy ones, or so many samples of each prompt."""
    import datasets
    import torch
    from peft import PeftModel

    model, tokenizer = _smollm2()
    folder, adapter = _base_and_adapter(smollm2.BASE, trained)
    rows = datasets.load_dataset("json", data_files=str(smollm2.BASE / rows_file), split="train")
    texts = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in rows["prompt"]]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    longest = load_config(smollm2.CONFIG).sampling.max_completion_length
    if adapter is not None:
        adapted = PeftModel.from_pretrained(model, str(adapter)).eval()
    elif folder != smollm2.BASE:
        adapted = type(model).from_pretrained(folder, dtype=torch.float32).to(model.device).eval()
    else:
        adapted = model
    options: dict[str, Any] = {"do_sample": False}
    if samples:
        torch.manual_seed(1)
        options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "num_return_sequences": samples}
    try:
        with torch.no_grad():
            output = adapted.generate(**inputs, max_new_tokens=longest, **options)
    finally:
        if adapter is not None:
            adapted.unload()
    answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    rights = [answer for answer in rows["answer"] for _ in range(max(1, samples))]
    scores = reward_of(smollm2.CONFIG)(completions=answers, answer=rights)
    return sum(float(score) for score in scores if isinstance(score, float)) / len(scores)


TASKS = {
    "sums": Task(
        sums.CONFIG, sums.BASE, sums.build_base_model, partial(_greedy_accuracy, sums.BASE), _TEXT, "=", "<eos>",
        goals=(0.80, 0.95),
    ),
    "digits": Task(
        "benchmarks/digits.yaml", _DIGITS, partial(_build_by, "benchmarks.digits", _DIGITS),
        partial(_greedy_accuracy, _DIGITS, longest=7), _TEXT, "=", "<eos>"
    ),
    "smollm2": Task(
        smollm2.CONFIG, smollm2.BASE, _build_smollm2, partial(_smollm2_accuracy, "eval.jsonl"), None, *_CHATML,
        goals=(0.45, 0.60),
    ),
    "lcm": Task(
        smollm2.CONFIG, smollm2.BASE, _build_lcm, partial(_smollm2_accuracy, "lcm-eval.jsonl", samples=2), None, *_CHATML,
        "lcm-train.jsonl", goals=(0.10, 0.20),
    ),
    "times": Task(
        smollm2.CONFIG, smollm2.BASE, _build_times, partial(_smollm2_accuracy, "times-eval.jsonl"), None, *_CHATML,
        "times-train.jsonl", goals=(0.50, 0.90),
    ),
    "calculator": Task(
        "examples/calculator/run.yaml", _CALCULATOR,
        partial(_build_by, "examples.calculator.build_model", _CALCULATOR), _calculator_accuracy, None,
        "<|assistant|>", r"<\|end\|>",
    ),
}  # fmt: skip
