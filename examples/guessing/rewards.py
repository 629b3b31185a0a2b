"""The share of games that were won, which the run watches and evaluates."""


def found(completions: list[list[dict[str, str]]], secret: list[int], **_: object) -> list[float]:
    """1 if the last guess was right. A completion is the list of messages of an episode."""
    guesses = [[each["content"] for each in messages if each["role"] == "assistant"] for messages in completions]
    return [float(mine[-1:] == [str(number)]) for mine, number in zip(guesses, secret, strict=True)]
