"""The demo's reward: is the sum right?"""


def exact_match(prompts: list[str], completions: list[str], answer: list[str], **_: object) -> list[float]:
    """1 for the right number and nothing else, 0 otherwise. `answer` is the dataset's column of that name."""
    return [float(completion == expected) for completion, expected in zip(completions, answer, strict=True)]
