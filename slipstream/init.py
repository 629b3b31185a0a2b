"""`slipstream init`: the files of a first run.

Guarantee: it asks nothing and replaces nothing. The files pass `--check`, and the run that they describe works.
"""

import random
import shlex
from pathlib import Path

import click

from protocol.errors import ConfigError
from protocol.runtime.json_lines import encode_line
from slipstream.options import Command
from slipstream.tables import write_line

_CONFIG = """\
# yaml-language-server: $schema={schema}
# A run of Slipstream. Start it:        slipstream run --config run.yaml
# All values, or every mistake:         slipstream run --check --config run.yaml
# What the reward says before a run:    slipstream reward try --config run.yaml

run_dir: runs/first # everything that the run writes; paths begin in this file's folder

model:
  path: Qwen/Qwen2.5-0.5B-Instruct # of the hub, or a folder
  # dtype: float32 # without a GPU; the default is bfloat16

dataset:
  path: train.jsonl # column `prompt`: a text or chat messages; the reward gets the other columns
  # transform: rewards.py:to_prompt # a function that makes such a row of yours

rewards:
  functions:
    - function: rewards.py:right # several are added up, each with its `weight`

sampling:
  num_generations: 8 # completions of a prompt, which are compared with each other
  max_completion_length: 128 # tokens

pipeline:
  groups_per_step: 16 # prompts of an optimizer step
  max_staleness: 1 # versions by which the policy may have moved on since a completion was sampled

# evaluation: # of prompts that are not trained on
#   dataset: {{path: eval.jsonl}}
#   every_versions: 20

lora: # peft.LoraConfig
  r: 16
  lora_alpha: 32

engine: # vLLM's engine arguments
  max_model_len: 512 # prompt and completion

trainer: # trl.GRPOConfig
  max_steps: 100
  # report_to: wandb # or tensorboard, trackio, mlflow
"""

_REWARDS = '''\
"""What a completion is worth. `run.yaml` names the function below."""

import re


def right(completions, answer, **columns):
    """Give 1 for a completion whose last number is the answer, else 0. `answer` is the column of that name."""
    return [float(last_number(completion) == wanted) for completion, wanted in zip(completions, answer)]


def last_number(completion):
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    return next(reversed(re.findall(r"-?\\d+", text)), None)
'''

_ROWS = 200


@click.command(cls=Command)
@click.argument("folder", default=".", type=click.Path(path_type=Path, file_okay=False))
def init(folder: Path) -> None:
    """Write the files of a first run.

    They are run.yaml, rewards.py and train.jsonl, in FOLDER or here.
    """
    from protocol.config.schema import FILE  # pydantic

    files = {"run.yaml": _CONFIG.format(schema=FILE), "rewards.py": _REWARDS, "train.jsonl": _rows()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in files:
            if (folder / name).exists():
                raise ConfigError(f"{folder / name} exists already, and nothing was written; name another folder")
        for name, text in files.items():
            with (folder / name).open("x", encoding="utf-8") as stream:
                stream.write(text)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: cannot be written: {error.strerror}") from error
    write_line(f"written: {', '.join(str(folder / name) for name in files)}")
    write_line(f"start it: slipstream run --config {shlex.quote(str(folder / 'run.yaml'))}")


def _rows() -> str:
    """Return sums of two numbers as rows of chat messages."""
    draw = random.Random(0)  # noqa: S311
    pairs = [(draw.randint(10, 999), draw.randint(10, 999)) for _ in range(_ROWS)]
    content = "What is {} + {}? End with the number."
    messages = [[{"role": "user", "content": content.format(*pair)}] for pair in pairs]
    rows = [
        {"prompt": prompt, "answer": str(one + other)} for prompt, (one, other) in zip(messages, pairs, strict=True)
    ]
    return "".join(encode_line(row) + "\n" for row in rows)
