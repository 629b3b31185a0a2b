"""`slipstream inspect`: the first prompts as the policy gets them, and what of a group is trained.

Guarantee: tokens, ends and answers come of the code by which producers and trainer make them. Neither an engine nor a GPU is
needed, and no weights are read.
"""

from typing import Any

from consumer.prompts.answers import Answers
from consumer.prompts.completion_limit import CompletionLimit
from consumer.prompts.dataset import PromptDataset
from consumer.prompts.loss_weights import LossWeights
from producer.groups import LeaseFailure
from protocol.config.run import RunConfig
from protocol.wire.codec import carried
from replay.batch_selection import LOSS_PARTS
from slipstream.run_inputs import RunInputs
from slipstream.tables import printable, write_line, write_table


def inspected(config: RunConfig, count: int) -> dict[str, Any]:
    """Return what is known of the first prompts before anything is generated. A prompt that no producer takes has a `problem`."""
    inputs = RunInputs(config)
    prompts, prompt_format = inputs.prompts(), inputs.prompt_format()
    tokenizer, sampling = prompt_format.tokenizer, config.sampling
    answers = Answers(config, prompts, inputs.model_folder) if config.loss.ce_coef else None
    weights = LossWeights(column, prompts) if (column := config.loss.weights_column) else None

    def pieces(ids: list[int]) -> list[tuple[int, str]]:
        return [(token, tokenizer.decode([token])) for token in ids]

    def one(prompt_id: int) -> dict[str, Any]:
        prompt, columns = carried(prompts[prompt_id])
        limit = CompletionLimit.of_run(sampling).of(columns)
        found: dict[str, Any] = {
            "row": prompts.place(prompt_id),
            "environment": _environment(config, prompts, prompt_id),
        }
        try:
            ids = prompt_format.encode(prompt, limit)
        except LeaseFailure as failure:
            return found | {"problem": failure.detail}
        answer = None if answers is None else answers.of(prompt_id, ids)
        found |= {"text": tokenizer.decode(ids), "prompt": pieces(ids)}
        found |= {"max_completion_length": limit}
        if answer is not None:
            found["answer"] = pieces(answer.tolist())
        if weights is not None:
            found["weights"] = dict(zip(LOSS_PARTS, weights.of(prompt_id), strict=True))
        return found

    return {
        "prompts": [one(prompt_id) for prompt_id in range(min(count, len(prompts)))],
        "ends": {"tokens": pieces(sorted(inputs.end_ids())), "texts": sampling.stop},
        "masks_truncated": bool(config.trainer.get("mask_truncated_completions")),
    }


def _environment(config: RunConfig, prompts: PromptDataset, prompt_id: int) -> str | None:
    """Return the name of what plays a prompt; None for a single turn."""
    name = prompts.environment_of(prompt_id)
    section = config.by_environment.get(name)
    return None if section is None else name or str(section.factory or section.agent)


def show(found: dict[str, Any]) -> None:
    for number, prompt in enumerate(found["prompts"]):
        write_line(f"Prompt {number}: {prompt['row']}")
        if "problem" in prompt:
            write_line(f"No producer takes it: {prompt['problem']}\n")
            continue
        write_line(printable(prompt["text"], keep="\n"))
        write_line()
        parts = [("prompt", "no", prompt["prompt"]), ("answer", "loss.ce_coef", prompt.get("answer", ()))]
        rows = [(str(token), repr(piece), part, trained) for part, trained, tokens in parts for token, piece in tokens]
        write_table(("token", "piece", "part", "trained"), rows, right="token")
        write_line(
            f"Then a completion of at most {prompt['max_completion_length']} tokens; those that the policy samples are trained."
        )
        if prompt["environment"] is not None:
            write_line(
                f"{prompt['environment']} plays it: tools and first words that it adds to the prompt, and its answers, are not "
                "trained. They are known when it plays."
            )
        if "weights" in prompt:
            write_line(
                f"Weights of the loss: {', '.join(f'{part} {each:g}' for part, each in prompt['weights'].items())}."
            )
        write_line()
    ends = [f"{token} {piece!r}" for token, piece in found["ends"]["tokens"]] + list(map(repr, found["ends"]["texts"]))
    write_line(f"A completion ends with {', '.join(ends) or 'nothing but its length'}; the end is trained, too.")
    if found["masks_truncated"]:
        write_line("One that is cut off is not trained (trainer.mask_truncated_completions).")
