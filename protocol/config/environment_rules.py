"""The rules between environments and other sections.

Guarantee: each text begins with a key that is in the wrong, and ends with the fix.
"""

from collections import Counter

from protocol.config.data import DatasetSection
from protocol.config.environments import SINGLE_TURN
from protocol.config.rewards import ATROPOS_ITEMS
from protocol.config.run_values import RunValues
from protocol.config.section import Problems, nearest


def environment_problems(config: RunValues) -> Problems:
    """Yield the contradictions of environments with other sections."""
    yield from _of_names(config)
    yield from _of_agents(config)
    if config.environment.atropos:
        yield from _of_atropos(config)
    if config.advantage.overlong_buffer_tokens:
        for section in config.by_environment.values():
            if section.trunk_turns != (0, 0):
                yield (
                    f"{section.key}.branch_after_turns: advantage.overlong_buffer_tokens counts tokens without those of a trunk, "
                    "which shorten what may follow; remove one of them"
                )


def _of_names(config: RunValues) -> Problems:
    sections = {"dataset": config.dataset} | (
        {"evaluation.dataset": config.evaluation.dataset} if config.evaluation else {}
    )
    given = {
        f"{name}{key.removeprefix('dataset')}.environment": source.environment
        for name, section in sections.items()
        for key, source in section.all_sources.items()
        if source.environment is not None
    }
    if not config.environments:
        for key, name in given.items():
            yield f"{key}: {name!r}: there are no `environments`; add them, or remove the key"
        for function in config.rewards.functions:
            if function.environments is not None:
                yield f"rewards.functions: {function.name}.environments: there are no `environments`; add them, or remove the key"
        return
    names = [environment.name for environment in config.environments]
    if config.environment.is_given:
        yield "environment: it is for a run with one; move it to `environments`, with a name"
    for name, count in Counter(names).items():
        if count > 1:
            yield f"environments: {count} of them are called {name!r}; give each a name of its own"
    for key, name in given.items():
        yield from _unknown(key, str(name), names)
    for function in config.rewards.functions:
        key = f"rewards.functions: {function.name}.environments"
        for name in function.environments or ():
            yield from _unknown(key, name, names)
        if function.posted is not None:
            unplayed = [name for name in function.environments or () if not config.posted_by(name)]
            if unplayed or not any(map(config.posted_by, names)):
                where = f"{key}: {unplayed[0]!r}" if unplayed else "rewards.functions"
                yield f"{where}: no agent plays it that could post {function.posted}; remove that reward there"
    for name in filter(config.rewards.names.__contains__, names):
        yield f"rewards.functions: {name!r} is what the own reward of environments.{name} is called; rename one"
    training = [source.environment for source in config.dataset.all_sources.values()]
    if None not in training:
        for name in filter(lambda name: name not in training, names):
            yield f"environments: no source has {name!r} as its `environment`, so it gets no rows; name it in one, or remove it"
        if len(names) == 1 and config.may_skip:
            yield f"environments.{names[0]}.on_failure: skip: every row is of this environment, so no other is left; remove it"
    yield from _of_rewards(config, names)


def _unknown(key: str, name: str, names: list[str]) -> Problems:
    if name not in names and name != SINGLE_TURN:
        known = ", ".join(names)
        yield f"{key}: {name!r} is not one of environments ({known}); {nearest(name, names, f'use one, or {SINGLE_TURN}')}"


def _of_rewards(config: RunValues, names: list[str]) -> Problems:
    alone = config.distillation is not None and config.distillation.alone
    for section in config.environments:
        functions = [
            function
            for function in config.rewards.functions
            if function.posted is None and function.scores(section.name)
        ]
        if section.factory is None and not config.posted_by(section.name):
            yield f"{section.key}: give factory or agent, or a posted reward of rewards.functions that agents of yours post"
        elif not alone and section.own_weight is None and not functions and not config.posted_by(section.name):
            yield f"{section.key}: nothing scores its completions; set its reward_weight, or name a reward function for it"
    if config.evaluation is not None:
        for key, source in config.evaluation.dataset.all_sources.items():
            if source.environment in names and config.posted_by(source.environment):
                yield (
                    f"evaluation.{key}.environment: {source.environment!r}: agents play it, and completions that producers "
                    "generate get no posted reward; remove the source"
                )
    if config.trainer.get("scale_rewards") == "batch":
        yield (
            "trainer.scale_rewards: batch divides by one standard deviation of all rewards, and environments have scales of "
            "their own; use group or none"
        )


def _of_agents(config: RunValues) -> Problems:
    posted = ", ".join(config.posted_rewards)
    for section in config.by_environment.values():
        if section.is_played_outside and not config.serve.enabled:
            yield f"{section.key}: its episodes are played through the endpoint, which is off; set serve.enabled=true"
        if section.agent_options.needs_port and config.serve.port == 0:
            yield (
                f"{section.key}.agent: the model server of {section.agent} has to know the endpoint; set serve.port, "
                "and its base URL to http://HOST:PORT/v1"
            )
    if posted and not config.serve.enabled:
        yield f"rewards.functions: agents post {posted} to the endpoint, which is off; set serve.enabled=true"
    if posted and config.environment.factory is not None:
        yield f"environment: agents that post {posted} have their own; remove the section, or that reward"
    if posted and config.evaluation is not None and not config.environments:
        yield f"evaluation: completions that producers generate get no posted {posted}; remove the section"


def _of_atropos(config: RunValues) -> Problems:
    if not config.serve.enabled:
        yield "serve.enabled: environments of Atropos generate through the endpoint, which is off; set it"
    if config.rewards.functions:
        yield "rewards.functions: environments of Atropos score their groups; remove them"
    rows = {"path": ATROPOS_ITEMS, "chat_template_kwargs": config.dataset.chat_template_kwargs}
    if config.dataset != DatasetSection.model_validate(rows):
        yield "dataset: environments of Atropos have their own items; remove the section, but for chat_template_kwargs"
    if config.evaluation is not None:
        yield (
            "evaluation: completions that producers generate would have no score; remove the section, environments of Atropos "
            "evaluate by themselves"
        )
    if config.reroll.max_attempts or config.reroll.solved_cooldown_epochs:
        yield "reroll: environments of Atropos choose their items; remove the section"
    steps = config.trainer.get("max_steps")
    if not isinstance(steps, int) or steps < 1:
        yield "trainer.max_steps: needed, because without a dataset there are no epochs"
