"""The section `environments`: names that rows and rewards may have, the columns of rewards, and what is refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from protocol.config.environments import environment_of
from protocol.config.run import RunConfig

EXACT = {"function": "rewards:exact", "weight": 2.0}
SINGLE = EXACT | {"environments": ["single_turn"]}
SHOP = {"name": "shop", "factory": "shop:Shop", "reward_weight": 0.5}
MAZE = {"name": "maze", "agent": "verifiers", "options": {"id": "maze"}}
OWN = {"name": "own"}  # played by an agent of the user's
BASE: dict[str, Any] = {
    "run_dir": "run",
    "model": {"path": "model"},
    "dataset": {"sources": [{"path": "a.jsonl", "environment": "shop"}, {"path": "b.jsonl"}]},
    "environments": [SHOP, MAZE, OWN],
    "rewards": {"functions": [EXACT, {"posted": "solved", "environments": ["own"]}]},
    "serve": {"enabled": True},
}


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(BASE | sections)


def test_each_environment_has_its_own_reward_and_its_agents_post_theirs() -> None:
    one = config()
    assert one.routes == ("single_turn", "shop", "maze", "own")
    assert (one.reward_names, one.reward_weights) == (("exact", "solved", "shop", "maze"), (2.0, 1.0, 0.5, 1.0))
    assert one.posted_rewards == ("solved", "maze")
    posted = {name: one.posted_by(name) for name in one.routes}
    assert posted == {"single_turn": {}, "shop": {}, "maze": {"environment": "maze"}, "own": {"solved": "solved"}}
    assert RunConfig.model_validate(one.model_dump(mode="json")) == one, "what --check prints can be read again"


def test_a_posted_reward_for_all_is_for_those_that_agents_play() -> None:
    one = config(rewards={"functions": [EXACT, {"posted": "solved"}]})
    assert one.posted_by("maze") == {"solved": "solved", "environment": "maze"}
    assert one.posted_by("shop") == one.posted_by("single_turn") == {}


def test_a_run_with_one_or_none_has_no_routes() -> None:
    alone = config(
        environments=[], environment="shop:Shop", dataset={"path": "a.jsonl"}, rewards={"functions": [EXACT]}
    )
    assert (alone.routes, list(alone.by_environment), alone.posted_rewards) == ((), [""], ())


def test_a_function_scores_the_rows_that_it_names() -> None:
    limited, every = config(
        rewards={"functions": [EXACT | {"environments": ["shop"]}, EXACT | {"name": "all"}, {"posted": "solved"}]}
    ).rewards.functions[:2]
    assert [limited.scores(name) for name in ("shop", "single_turn")] == [True, False]
    assert every.scores("single_turn")
    assert (environment_of({"environment": "shop"}), environment_of({"environment": None})) == ("shop", "single_turn")


def source(**values: Any) -> dict[str, Any]:
    return {"dataset": {"path": "a.jsonl"} | values}


@pytest.mark.parametrize(
    ("sections", "key", "value"),
    [
        ({"environments": [SHOP, SHOP]}, "environments", "'shop'"),
        ({"environments": [SHOP | {"name": "single_turn"}]}, "name", "`single_turn`"),
        ({"environments": [SHOP | {"name": "a b"}]}, "name", "64 letters"),
        ({"environments": [{"factory": "shop:Shop"}]}, "name", "required"),
        ({"environments": [{"name": "a", "agent": "atropos"}]}, "agent", "Atropos"),
        ({"environment": "shop:Shop"}, "environment", "`environments`"),
        (source(environment="shp"), "dataset.environment", "'shp'"),
        (source(environment="shp"), "dataset.environment", "did you mean `shop`"),
        (source(environment="shop"), "environments", "'maze'"),
        ({"environments": [], "rewards": {"functions": [EXACT]}}, "dataset.sources[0].environment", "'shop'"),
        (source() | {"environments": [], "rewards": {"functions": [SINGLE]}}, "exact.environments", "no `environments`"),
        ({"rewards": {"functions": [EXACT | {"environments": ["mazes"]}]}}, "exact.environments", "'mazes'"),
        ({"rewards": {"functions": [{"posted": "solved", "environments": ["shop", "own"]}]}}, "solved.environments", "'shop'"),
        (
            source() | {"environments": [SHOP], "rewards": {"functions": [{"posted": "solved"}]}},
            "rewards.functions",
            "post solved",
        ),
        ({"rewards": {"functions": [EXACT]}}, "environments.own", "posted reward"),
        ({"environments": [OWN | {"reward_weight": 1.0}]}, "reward_weight", "rewards.functions"),
        (
            source() | {"environments": [{"name": "a", "factory": "a:A"}], "rewards": {"functions": [SINGLE]}}, "environments.a",
            "nothing scores",
        ),
        ({"rewards": {"functions": [EXACT | {"name": "shop"}, {"posted": "solved"}]}}, "rewards.functions", "'shop'"),
        ({"trainer": {"scale_rewards": "batch"}}, "trainer.scale_rewards", "batch"),
        ({"evaluation": {"dataset": {"path": "h.jsonl", "environment": "maze"}}}, "evaluation.dataset.environment", "'maze'"),
        ({"evaluation": {"dataset": {"path": "h.jsonl", "environment": "mze"}}}, "evaluation.dataset.environment", "'mze'"),
        ({"serve": {}}, "environments.maze", "serve.enabled"),
        (source() | {"loss": {"ce_coef": 0.1}}, "loss.ce_coef", "environment"),
        ({"environments": [SHOP | {"on_failure": "ignore"}]}, "environments.0.on_failure", "skip"),
        (
            source(environment="shop") | {"environments": [SHOP | {"on_failure": "skip"}], "rewards": {"functions": [EXACT]}},
            "environments.shop.on_failure", "no other",
        ),
        (
            source() | {"environments": [], "environment": {"factory": "shop:Shop", "on_failure": "skip"}},
            "environment", "on_failure",
        ),
        (
            {"dataset": {"sources": [{"path": "a.jsonl", "environment": "shop", "weight": 0}, {"path": "b.jsonl", "weight": 1}]}},
            "dataset.sources.0.weight", "greater than 0",
        ),
    ],
)  # fmt: skip
def test_a_wrong_name_is_refused_with_its_key_and_the_value(sections: dict[str, Any], key: str, value: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config(**sections)
    assert key in str(caught.value)
    assert value in str(caught.value)
