"""The model of `benchmarks.overlap`: 20 M parameters, built in a minute or two, whose completions have log-normal lengths.

    python -m benchmarks.overlap_base OUTPUT_DIR

The task is *echo*: the prompt names four letters ("kqbz:"), the completion should consist of them. The base is careless:
half of its letters may be any. How long a completion is was drawn from a log-normal distribution in the corpus and has
nothing to do with the prompt, nor does the reward, the share of fitting letters, ask for any; hardly any group is without
signal. Lengths stay what they are at small learning rates only.

What is pre-trained is a fiftieth of the model: two layers, a quarter as wide. The rest is put around it and below it with
weights that nothing reads, or that write nothing: it changes no output and costs what it costs, in every forward, backward
and decode step.

Guarantee: the folder appears complete or not at all, and is built again when this file has changed. Held-out prompts occur
neither in the corpus nor among the prompts to train on.
"""

import itertools
import json
import math
import random
import re
import string
import subprocess
import sys
import time
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from examples.arithmetic.build_model import make_tokenizer, pretrain, save
from examples.folders import build_once


def fitting_share(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """Share of letters that the prompt names; 0 for an empty completion."""
    return [
        sum(letter in prompt for letter in completion) / len(completion) if completion else 0.0
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


@torch.inference_mode()
def held_out_reward(base: Path, adapter: Path | None, num_prompts: int) -> float:
    """Mean reward of one completion per prompt, sampled with a fixed seed."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    lines = (base / "eval.jsonl").read_text(encoding="utf-8").splitlines()[:num_prompts]
    prompts = [json.loads(line)["prompt"] for line in lines]
    inputs = tokenizer(prompts, return_tensors="pt")
    output = model.eval().generate(**inputs, max_new_tokens=MAX_LENGTH, do_sample=True, top_k=0)
    completions = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    rewards = fitting_share(prompts, completions)
    return sum(rewards) / len(rewards)


VOCAB = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", ":", *string.ascii_lowercase])}
PAD, EOS = VOCAB["<pad>"], VOCAB["<eos>"]
NUM_LETTERS = 4  # in a prompt
PROMPT_LENGTH = NUM_LETTERS + 1
MEDIAN_LENGTH, SIGMA_LENGTH = 18, 0.5  # of completions, the end token included; sigma of the logarithm
MAX_LENGTH = 96
CARELESS = 0.5  # share of letters that may be any

NUM_LAYERS = 6
_WIDTH, _MLP_WIDTH, _HEAD_WIDTH = 512, 1536, 64
_SMALL_LAYERS, _SMALL = 2, 4  # the part that is pre-trained is narrower by this factor
_STEPS, _BATCH = 900, 32


def make_prompts(seed: int, num_held_out: int = 500) -> tuple[list[str], list[str]]:
    """Every choice of four letters, each in a random order: those to train on, those to evaluate on."""
    draw = random.Random(seed)
    prompts = ["".join(draw.sample(letters, NUM_LETTERS)) + ":" for letters in _choices()]
    draw.shuffle(prompts)
    return prompts[num_held_out:], prompts[:num_held_out]


def _choices() -> list[tuple[str, ...]]:
    return list(itertools.combinations(string.ascii_lowercase, NUM_LETTERS))


def draw_length(draw: random.Random) -> int:
    """Tokens of a completion, the end token included."""
    return min(MAX_LENGTH, max(2, round(draw.lognormvariate(math.log(MEDIAN_LENGTH), SIGMA_LENGTH))))


def _corpus(prompts: list[str], draw: random.Random) -> torch.Tensor:
    """Careless answers to some prompts: (len(prompts), longest), padded on the right."""
    rows = []
    for prompt in prompts:
        letters = [
            VOCAB[draw.choice(string.ascii_lowercase if draw.random() < CARELESS else prompt[:NUM_LETTERS])]
            for _ in range(draw_length(draw) - 1)
        ]
        rows.append([*(VOCAB[letter] for letter in prompt), *letters, EOS])
    width = max(map(len, rows))
    return torch.tensor([row + [PAD] * (width - len(row)) for row in rows])


def _model(num_layers: int, narrower: int) -> Qwen2ForCausalLM:
    heads = _WIDTH // _HEAD_WIDTH // narrower
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(VOCAB),
            hidden_size=_WIDTH // narrower,
            intermediate_size=_MLP_WIDTH // narrower,
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=128,
            initializer_range=0.06 if narrower > 1 else 0.02,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            eos_token_id=EOS,
            bos_token_id=None,
        )
    )


def _pretrained(prompts: list[str]) -> Qwen2ForCausalLM:
    draw = random.Random(0)
    model = _model(_SMALL_LAYERS, _SMALL)

    def loss_of(_step: int) -> torch.Tensor:
        ids = _corpus(draw.sample(prompts, _BATCH), draw)
        logits = model(ids[:, :-1], use_cache=False).logits[:, PROMPT_LENGTH - 1 :]
        wanted = ids[:, PROMPT_LENGTH:].flatten()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted, ignore_index=PAD)

    pretrain(model, loss_of, _STEPS, say_every=50)
    return model


@torch.no_grad()
def grown(small: Qwen2ForCausalLM) -> Qwen2ForCausalLM:
    """The same function in a larger model: what is new in the residual stream stays zero, as nothing writes there, and new
    heads, units and layers write nothing."""
    large = _model(NUM_LAYERS, 1)
    for name, weight in large.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight")):
            weight.zero_()
    first = NUM_LAYERS - _SMALL_LAYERS  # the last layers, which every LoRA covers
    for name, weight in small.named_parameters():
        target = large.get_parameter(re.sub(r"layers\.(\d+)", lambda found: f"layers.{int(found[1]) + first}", name))
        target[tuple(slice(length) for length in weight.shape)] = weight
        if name.endswith("norm.weight"):  # a norm over four times as many numbers, three quarters of them zero
            target /= math.sqrt(_SMALL)
    return large


def main(output: Path) -> None:
    started = time.monotonic()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, evaluation = make_prompts(0)
    model = grown(_pretrained(train))
    tokenizer = make_tokenizer(VOCAB, max_length=128)
    save(output, model, tokenizer, *([{"prompt": prompt} for prompt in prompts] for prompts in (train, evaluation)))
    print(f"{output}: {model.num_parameters():,} parameters, {time.monotonic() - started:.0f} s")


def build(folder: Path) -> None:
    """Builds the model in `folder`, unless it is there."""
    command = [sys.executable, "-m", "benchmarks.overlap_base"]
    build_once(folder, Path(__file__).read_bytes(), lambda made: subprocess.run([*command, str(made)], check=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
