"""The game of the guessing example: what is said, what a guess is worth, and which games are won."""

import math
from pathlib import Path

import pytest

from examples.guessing.environment import Guessing
from examples.guessing.game import LARGEST, TURNS, Game
from examples.guessing.rewards import found
from protocol.config.loader import load_config

REPOSITORY = Path(__file__).parents[3]


def test_a_guess_is_worth_what_its_answer_excludes() -> None:
    game = Game(3)
    assert game.answer("8") == ("lower", 1.0, False)  # 7 of 15 are left
    assert game.answer("1") == ("higher", pytest.approx(math.log2(7 / 6)), False)
    assert game.answer("8") == ("lower", 0.0, False)
    assert game.answer("4") == ("lower", 1.0, False)  # 2 and 3 are left of 2 to 7
    assert game.answer("3") == ("right", 1.0, True)
    for text in ("", "0", "16", "-1", "x", "\N{SUPERSCRIPT TWO}"):
        assert Game(3).answer(text) == ("", 0.0, True)


@pytest.mark.parametrize("secret", range(1, LARGEST + 1))
def test_halving_wins_each_game_with_the_full_reward(secret: int) -> None:
    environment, low, high, rewards = Guessing(), 1, LARGEST, []
    environment.reset(secret=secret, prompt=[])
    while not environment.done:
        guess = (low + high) // 2
        said = environment.reply(str(guess))
        rewards.append(environment.get_turn_reward())
        low, high = (guess + 1, high) if said == "higher" else (low, guess - 1)
    assert len(rewards) <= TURNS
    assert set(rewards) == {1.0}


def test_the_run_credits_turns_alone() -> None:
    config = load_config(str(REPOSITORY / "examples" / "guessing" / "run.yaml"))
    assert (config.rewards.credit, config.rewards.outcome_weight, config.environment.max_turns) == (
        "per_turn",
        0.0,
        TURNS,
    )
    assert config.evaluation is not None
    assert config.evaluation.metric in config.reward_names


def test_a_game_is_won_by_its_last_guess() -> None:
    def guesses(*texts: str) -> list[dict[str, str]]:
        return [
            message
            for text in texts
            for message in ({"role": "assistant", "content": text}, {"role": "user", "content": "lower"})
        ]

    assert found([guesses("8", "3"), guesses("3", "8"), [], guesses("12")[:1]], [3, 3, 3, 12]) == [1.0, 0.0, 0.0, 1.0]
