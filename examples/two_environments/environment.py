"""The second environment of the example: no tool, a reply that ends the episode, and a reward of its own."""


class Notes:
    """Wants both numbers written side by side: 4786 for 47*86. A tool call is wrong here."""

    def reset(self, prompt: list[dict[str, str]], **_: object) -> None:
        """Begin an episode on a row."""
        self._wanted = prompt[-1]["content"].rstrip("=").replace("*", "")
        self._said = ""

    def reply(self, text: str) -> None:
        """Take the turn and end the episode."""
        self._said = text

    def get_reward(self) -> float:
        """Return 1 for the two numbers and nothing else."""
        return float(self._said == self._wanted)
