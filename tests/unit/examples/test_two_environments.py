"""The example of two environments: what each wants of the same rows, and how its run routes and weighs them."""

from pathlib import Path

import pytest

from examples.two_environments.environment import Notes
from protocol.config.loader import load_config

FOLDER = Path(__file__).parents[3] / "examples" / "two_environments"


@pytest.mark.parametrize(("said", "reward"), [("4786", 1.0), ("4042", 0.0), ("47*86", 0.0), ("", 0.0)])
def test_notes_are_both_numbers_side_by_side_and_nothing_else(said: str, reward: float) -> None:
    episode = Notes()
    episode.reset(prompt=[{"role": "user", "content": "47*86="}], answer="4042")
    episode.reply(said)
    assert episode.get_reward() == reward
    episode.reset(prompt=[{"role": "user", "content": "47*86="}])
    assert episode.get_reward() == 0.0, "an episode remembers nothing of the one before"


def test_both_are_played_on_the_same_rows_with_rewards_of_their_own() -> None:
    config = load_config(FOLDER / "run.yaml")
    assert (config.routes, config.may_skip) == (("single_turn", "calculator", "notes"), ("calculator", "notes"))
    assert config.reward_names == ("correct", "notes")
    training, held_out = config.dataset.sources, config.evaluation.dataset.sources if config.evaluation else []
    assert [source.environment for source in training] == [source.environment for source in held_out]
    assert len({source.path for source in training}) == 1
    correct = config.rewards.functions[0]
    assert [correct.scores(name) for name in ("calculator", "notes")] == [True, False]
