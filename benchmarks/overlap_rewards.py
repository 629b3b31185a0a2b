"""The reward of `benchmarks.overlap`: how much of a completion echoes its prompt."""


def fitting_share(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """Share of letters that the prompt names; 0 for an empty completion."""
    return [
        sum(letter in prompt for letter in completion) / len(completion) if completion else 0.0
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
