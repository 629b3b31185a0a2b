"""The demo's reward: does the last turn give the right number?"""


def correct(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
    """1 for the right number and nothing else. A completion is the list of messages of an episode."""
    return [float(messages[-1]["content"] == right) for messages, right in zip(completions, answer, strict=True)]
