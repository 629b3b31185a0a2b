"""The child process that loads a policy and computes what it thinks of groups: `python -m tools.view.scores.child FD POLICY`.

Guarantee: the numbers are those of the trainer's own forward pass (`consumer.loss.forward`) without dropout: log-probs at the
temperature that was sampled with, and entropies, in nats. Whatever goes wrong with a model or a group is an answer that says so.
"""

import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from peft import PeftModel

from consumer.checkpoints.adapter_folder import AdapterFolder
from consumer.loss.forward import Tokens, is_plain, token_logprobs
from consumer.loss.lm_head import TokenLogprobs
from consumer.training.vision_language import load_model
from protocol.config.sections.model import ModelSection
from protocol.processes.worker_channel import WorkerChannel
from tools.view.scores.questions import Answer, Policy, Question

_NICE = 10
_SHOWN = 500


def main(descriptor: int, policy: bytes) -> None:
    os.nice(_NICE)
    channel = WorkerChannel(descriptor)
    model: Any = None
    while (frame := channel.receive()) is not None:
        try:
            if model is None:
                model = load(msgspec.json.decode(policy, type=Policy))
            answer = scores(model, msgspec.msgpack.decode(frame, type=Question))
        except Exception as error:  # libraries raise errors of many kinds
            answer = Answer(problem=f"{type(error).__name__}: {error}"[:_SHOWN])
        channel.send(answer)


def load(policy: Policy) -> Any:
    """The causal language model, with the adapter's layers in it."""
    options: dict[str, Any] = {"dtype": getattr(torch, policy.dtype), "trust_remote_code": False}
    if policy.quantization:
        from consumer.training.quantization import quantization_config

        values = {"path": policy.base, "dtype": policy.dtype, "quantization": policy.quantization}
        options["quantization_config"] = quantization_config(ModelSection.model_validate(values))
    model = load_model(Path(policy.base), local_files_only=True, use_safetensors=True, **options)
    if policy.adapter:
        folder = AdapterFolder.read(Path(policy.adapter), "the adapter")
        model = PeftModel.from_pretrained(model, folder.path).get_base_model()
    return model.eval()


def scores(model: Any, question: Question) -> Answer:
    """One record after the other, so that the memory is that of one row."""
    prompt = torch.from_numpy(np.frombuffer(question.prompt_ids, "<i4").astype(np.int64))
    ids = torch.from_numpy(np.frombuffer(question.completion_ids, "<i4").astype(np.int64))
    with torch.no_grad():
        rows = [_row(model, prompt, record, question.temperature) for record in ids.split(question.lengths)]
    columns = (torch.cat(values).float().numpy() for values in zip(*rows, strict=True))
    return Answer(*(column.astype("<f4").tobytes() for column in columns))


def _row(
    model: Any, prompt: torch.Tensor, record: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(T,) each."""
    ids = torch.cat([prompt, record])[None]
    if is_plain(model):

        def head(*values: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return TokenLogprobs.apply(*values, temperature, False)  # type: ignore[no-any-return]

        logprobs, entropies = token_logprobs(model, Tokens(ids, torch.ones_like(ids), len(record)), head)
        return logprobs[0], entropies[0]
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
    log_p = logits.log_softmax(-1)
    return log_p.gather(1, record[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].encode())
