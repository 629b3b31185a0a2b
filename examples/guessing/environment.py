"""The game as an environment without tools: `reply` answers each turn of the policy, and each turn has a reward of its own."""

from examples.guessing.game import Game


class Guessing:
    """Answers guesses."""

    def reset(self, secret: int, **_: object) -> None:
        """Begin an episode: the row's `secret` is the number."""
        self._game = Game(secret)
        self.done, self._reward = False, 0.0

    def reply(self, text: str) -> str:
        """Answer a turn. The policy does not see the answer that ends the episode."""
        said, self._reward, self.done = self._game.answer(text)
        return said

    def get_turn_reward(self) -> float:
        """Return the reward of the last turn."""
        return self._reward
