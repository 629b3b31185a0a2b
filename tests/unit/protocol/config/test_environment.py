"""The `environment:` section, its short form, and the column of rewards that it adds."""

from typing import Any

import pytest
from pydantic import ValidationError

from protocol.config.run import RunConfig

BASE: dict[str, Any] = {
    "run_dir": "run",
    "model": {"path": "model"},
    "dataset": {"path": "train.jsonl"},
    "rewards": {"functions": [{"function": "rewards:exact", "weight": 2.0}]},
}


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(BASE | sections)


def test_the_short_form_is_the_factory() -> None:
    assert config(environment="shop:Shop").environment == config(environment={"factory": "shop:Shop"}).environment
    assert config().environment.factory is None


def test_the_reward_of_the_environment_is_the_last_column() -> None:
    assert (config().reward_names, config().reward_weights) == (("exact",), (2.0,))
    own = config(environment={"factory": "shop:Shop", "reward_weight": 0.5}, reroll={"reward": "environment"})
    assert (own.reward_names, own.reward_weights) == (("exact", "environment"), (2.0, 0.5))
    alone = config(environment={"factory": "shop:Shop", "reward_weight": 1.0}, rewards={})
    assert (alone.reward_names, alone.reward_weights) == (("environment",), (1.0,))


@pytest.mark.parametrize("credit", ["per_turn", "per_step", "given"])
def test_rewards_of_an_openenv_servers_steps_do_not_count_twice(credit: str) -> None:
    server = {"factory": "openenv", "reward_weight": 0.5, "options": {"url": "http://h:8000"}}
    plain = config(environment=server)
    assert plain.outcome_weights == plain.reward_weights == (2.0, 0.5)
    of_turns = config(environment=server, rewards=BASE["rewards"] | {"credit": credit})
    assert (of_turns.outcome_weights, of_turns.reward_weights) == ((2.0, 0.0), (2.0, 0.5))
    own = {"factory": "shop:Shop", "reward_weight": 0.5}
    assert config(environment=own, rewards=BASE["rewards"] | {"credit": credit}).outcome_weights == (2.0, 0.5)


ATROPOS: dict[str, Any] = {
    "run_dir": "run",
    "model": {"path": "model"},
    "environment": {"agent": "atropos"},
    "serve": {"enabled": True},
    "trainer": {"max_steps": 10},
}


def test_environments_of_atropos_need_no_dataset_and_no_reward_functions() -> None:
    derived = RunConfig.model_validate(ATROPOS)
    assert (derived.reward_names, derived.reward_weights) == (("environment",), (1.0,))
    assert (derived.dataset.path, derived.reroll.max_attempts) == ("atropos", 0)
    assert RunConfig.model_validate(derived.model_dump(mode="json")) == derived, "what --check prints can be read again"
    template = ATROPOS | {"dataset": {"chat_template_kwargs": {"enable_thinking": False}}}
    assert RunConfig.model_validate(template).dataset.chat_template_kwargs == {"enable_thinking": False}
    weighted = ATROPOS | {"environment": {"agent": "atropos", "reward_weight": 0.5}}
    assert RunConfig.model_validate(weighted).reward_weights == (0.5,)


def test_what_is_played_outside_posts_the_environments_reward_and_those_that_ask_for_more() -> None:
    outside = {"agent": "verifiers", "options": {"id": "gsm8k"}}
    one = config(environment=outside, serve={"enabled": True}, rewards={})
    assert (one.reward_names, one.reward_weights, one.posted_rewards) == (("environment",), (1.0,), ("environment",))
    functions = [{"posted": "style", "weight": 0.0}, {"function": "rewards:exact"}]
    more = config(
        environment={"agent": "nemo_gym", "options": {"url": "http://127.0.0.1:11000/run"}, "reward_weight": 0.5},
        serve={"enabled": True, "port": 8000},
        rewards={"functions": functions},
    )
    assert more.reward_names == ("style", "exact", "environment")
    assert (more.reward_weights, more.posted_rewards) == ((0.0, 1.0, 0.5), ("style", "environment"))
    assert more.environment.agent_options.model_dump() == {"url": "http://127.0.0.1:11000"}
    assert RunConfig.model_validate(more.model_dump()) == more, "what --check prints can be read again"


TAUGHT = {
    "teachers": [{"name": "big", "url": "http://h:8000"}],
    "distillation": {"mode": "advantage", "alone": True},
}


def test_where_teachers_alone_teach_no_reward_function_is_needed() -> None:
    assert RunConfig.model_validate(BASE | {"rewards": {}} | TAUGHT).reward_names == ()


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (BASE | {"rewards": {}}, "rewards.functions: nothing scores the completions"),
        (
            BASE | {"rewards": {}, "environment": {"factory": "mcp", "options": {"servers": []}}},
            "or set environment.reward_weight",
        ),
        (
            BASE | {"rewards": {}} | TAUGHT | {"distillation": {"mode": "advantage"}},
            "rewards.functions: nothing scores",
        ),
        (
            BASE | {"rewards": {}} | TAUGHT | {"evaluation": {"dataset": {"path": "held-out"}}},
            "evaluation: nothing scores",
        ),
        ({"serve": {}}, "serve.enabled: environments of Atropos generate through the endpoint"),
        ({"environment": {"agent": "atropos", "factory": "shop:Shop"}}, "give one of factory and agent"),
        ({"environment": {"agent": "atropos", "options": {"id": "a"}}}, "options.id: unknown key `id`; valid: none"),
        ({"environment": {"agent": "unheard"}}, "no installed package has a plugin `unheard`"),
        (
            {"environment": {"agent": "unheard"}},
            "installed: atropos, mcp, nemo_gym, openenv, simulated_user, verifiers",
        ),
        ({"rewards": {"functions": [{"function": "a:b"}]}}, "rewards.functions: environments of Atropos score"),
        ({"dataset": {"path": "train.jsonl"}}, "dataset: environments of Atropos have their own items"),
        ({"dataset": {"max_prompt_tokens": 5}}, "dataset: environments of Atropos have their own items"),
        ({"dataset": "train.jsonl"}, "dataset"),
        ({"reroll": {"max_attempts": 2}}, "reroll: environments of Atropos choose their items"),
        ({"reroll": {"solved_cooldown_epochs": 1}}, "reroll: environments of Atropos choose their items"),
        ({"trainer": {}}, "trainer.max_steps: needed"),
        ({"evaluation": {"dataset": {"path": "held-out"}}}, "evaluation: completions that producers generate would"),
        ({"environment": {}}, "dataset"),
    ],
)
def test_what_contradicts_itself_is_refused(sections: dict[str, Any], said: str) -> None:
    """Of environments of Atropos, and without a reward. Others are in the table of refusals."""
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate(sections if "run_dir" in sections else ATROPOS | sections)
    assert said in str(caught.value)


@pytest.mark.parametrize("environment", ["shop:Shop", {"factory": "shop:Shop"}])
@pytest.mark.parametrize("rewards", [{}, {"functions": []}, {"num_workers": 3}])
def test_the_only_reward_counts(environment: Any, rewards: dict[str, Any]) -> None:
    config = RunConfig.model_validate(BASE | {"environment": environment, "rewards": rewards})
    assert (config.own_rewards, config.reward_weights) == ({"environment": 1.0}, (1.0,))
    given = RunConfig.model_validate(
        BASE | {"environment": {"factory": "shop:Shop", "reward_weight": 0.5}, "rewards": rewards}
    )
    assert given.own_rewards == {"environment": 0.5}
    beside = rewards | {"functions": [{"function": "exact_match"}]}
    assert RunConfig.model_validate(BASE | {"environment": environment, "rewards": beside}).own_rewards == {}


def test_functions_have_no_more_calls_at_once_than_processes() -> None:
    functions = [{"function": "a.py:judge", "concurrency": 3}, {"url": "http://service", "concurrency": 64}]
    assert RunConfig.model_validate(BASE | {"rewards": {"num_workers": 3, "functions": functions}})
    with pytest.raises(ValidationError, match=r"judge has concurrency: 3, .* num_workers: 2 .* raise num_workers"):
        RunConfig.model_validate(BASE | {"rewards": {"functions": functions}})
