"""Held-out reward of an adapter, by plain transformers and PEFT: nothing of Slipstream takes part."""

import json
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from benchmarks.overlap_base import MAX_LENGTH
from benchmarks.overlap_rewards import fitting_share


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
