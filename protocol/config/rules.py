"""The rules across sections.

Guarantee: each text begins with a key that is in the wrong, and ends with the fix.
"""

from protocol.config import lora_section
from protocol.config.data import WEIGHTED_SUM
from protocol.config.environment_rules import environment_problems
from protocol.config.rewards import REWARD_NAME
from protocol.config.run_values import RunValues
from protocol.config.section import Problems, nearest


def contradictions(config: RunValues) -> Problems:
    """Yield what the sections of a configuration cannot be together."""
    yield from lora_section.patch_problems(config)
    yield from _of_rewards(config)
    yield from _of_teachers(config)
    yield from _of_advantages(config)
    yield from _of_answers(config)
    yield from environment_problems(config)
    yield from _of_evaluation(config)
    if config.engine_server is not None:
        yield from _of_engine_server(config)
    yield from _of_stops(config)
    yield from _of_quantization(config)
    if config.pipeline.gpu == "shared" and config.engine.get("kv_cache_memory_bytes"):
        yield (
            "engine.kv_cache_memory_bytes: vLLM takes it whatever its share of the GPU is, and with pipeline.gpu=shared the "
            "trainer has the rest; set engine.gpu_memory_utilization instead"
        )
    if config.pipeline.gpu == "turns":
        yield from _of_turns(config)
    limit = config.sampling.max_completion_length
    if config.advantage.overlong_buffer_tokens > limit:
        yield (
            f"advantage.overlong_buffer_tokens={config.advantage.overlong_buffer_tokens} is more than "
            f"sampling.max_completion_length={limit}"
        )
    if config.sampling.max_completion_length_column is not None and config.advantage.overlong_buffer_tokens:
        yield (
            "sampling.max_completion_length_column: advantage.overlong_buffer_tokens counts from the one limit of all rows; "
            "remove one of them"
        )
    if config.sampling.max_completion_length_column is not None and config.environment.atropos:
        yield "sampling.max_completion_length_column: items of Atropos' environments have no rows with columns; remove the key"
    if config.control_endpoint == config.blob_endpoint:
        yield f"transport.endpoint and transport.blob_endpoint are both {config.blob_endpoint}; change one"


def _of_rewards(config: RunValues) -> Problems:
    own = config.environment
    if not config.reward_names and (config.distillation is None or not config.distillation.alone):
        yield (
            "rewards.functions: nothing scores the completions; name a reward function, or set environment.reward_weight for "
            "an environment that has get_reward, or distillation.alone where teachers teach all"
        )
    if own.reward_weight is not None and not own.is_given:
        yield "environment.reward_weight: there is no environment.factory"
    if REWARD_NAME in config.rewards.names and REWARD_NAME in config.own_rewards:
        yield f"rewards.functions: {REWARD_NAME!r} is what the environment's own reward is called"
    if (
        config.weights == "adapter"
        and config.probe_every
        and "lm_head" in (config.lora_section["target_modules"] or ())
    ):
        yield (
            "lora.target_modules: vLLM cannot score the probe of a swap under an adapter of lm_head; set swap.mode=merged, or "
            "swap.probe_every=0, or leave lm_head out"
        )
    if config.dataset.curriculum is not None and not config.reward_names:
        yield "dataset.curriculum: nothing scores completions; name reward functions, or remove it"
    reward = config.reroll.reward
    if reward is not None and reward not in config.reward_names:
        yield f"reroll.reward: {_unknown_reward(reward, config.reward_names)}"
    for number, source in enumerate(config.dataset.sources):
        if source.judge is not None and source.judge not in config.reward_names:
            yield f"dataset.sources.{number}.judge: {_unknown_reward(source.judge, config.reward_names)}"


def _of_teachers(config: RunValues) -> Problems:
    names, section = [teacher.name for teacher in config.teachers], config.distillation
    if bool(names) != (section is not None):
        yield "teachers and distillation need each other; give both, or remove one"
    if len(set(names)) < len(names):
        yield "teachers: two of them have one name; metrics need different names"
    if section is not None and (config.sampling.temperature != 1.0 or config.sampling.accept_biased_ratios):
        yield (
            "sampling: log-probs of a teacher are those at temperature 1, of all tokens; set temperature=1.0 and remove "
            "accept_biased_ratios"
        )
    own = [number for number, teacher in enumerate(config.teachers) if teacher.prompt is not None]
    if own and (config.by_environment or config.posted_rewards):
        yield (
            f"teachers.{own[0]}.prompt: it stands in place of the row's prompt, and environments and agents make their own; "
            "remove it, or give a url"
        )
    if own and section is not None and section.mode != "advantage":
        yield f"teachers.{own[0]}.prompt: the policy itself teaches with distillation.mode: advantage only; set it, or give a url"
    if section is not None and section.alone and config.rewards.credit != "outcome":
        yield "rewards.credit: with distillation.alone rewards teach nothing; remove one of them"
    is_alone = config.advantage.baseline == "none" or (section is not None and section.alone)
    if config.sampling.num_generations == 1 and not (is_alone and config.pipeline.groups_per_step > 1):
        yield (
            "sampling.num_generations: rewards teach by comparing at least 2 completions; only with distillation.alone or "
            "advantage.baseline: none, and pipeline.groups_per_step of 2 or more, may it be 1"
        )


def _of_advantages(config: RunValues) -> Problems:
    """Yield what compares completions beside a baseline that does not."""
    if config.advantage.baseline != "none":
        return
    if str(config.trainer.get("scale_rewards", "group")) not in ("none", "False"):
        yield (
            "advantage.baseline: none trains rewards as they are, and trainer.scale_rewards (default: group) divides by "
            "deviations, which are 0 where rewards are equal; set trainer.scale_rewards: none"
        )
    if config.trainer.get("multi_objective_aggregation") == "normalize_then_sum":
        yield (
            "trainer.multi_objective_aggregation: normalize_then_sum compares completions, as advantage.baseline: none does not"
        )
    if config.rewards.credit in ("per_turn", "per_step"):
        yield (
            f"rewards.credit: {config.rewards.credit} compares spans, which advantage.baseline: none does not; use outcome or "
            "given"
        )


def _of_answers(config: RunValues) -> Problems:
    """Yield the settings that leave `loss` without what it takes from rows."""
    if config.loss.weights_column is not None and config.environment.atropos:
        yield "loss.weights_column: items of Atropos' environments have no rows with columns; remove the key"
    if config.loss.ce_coef and config.by_environment:
        yield (
            "loss.ce_coef: in an environment an answer is a whole episode, which a column does not have; remove one of them"
        )
    if config.loss.ce_coef and all(source.answer_column is None for source in config.dataset.all_sources.values()):
        yield "loss.ce_coef: no column has the reference answers; set dataset.answer_column, or remove ce_coef"


def _of_quantization(config: RunValues) -> Problems:
    if config.model.quantization is not None and config.pipeline.shard_base == "layers":
        yield (
            f"model.quantization: weights in {config.model.quantization} cannot be spread over ranks and gathered again; set "
            "pipeline.shard_base=none, or remove model.quantization"
        )
    if config.engine.get("quantization") and config.weights == "merged":
        yield (
            "engine.quantization: quantized weights cannot take up an adapter without another rounding; set swap.mode=adapter, "
            "or remove it"
        )


def _of_turns(config: RunValues) -> Problems:
    """Yield the settings that do not move between a GPU and host memory."""
    if config.pipeline.shard_base == "layers":
        yield "pipeline.shard_base: layers is for several GPUs, and pipeline.gpu=turns for one; remove one of them"
    if config.model.quantization is not None:
        yield (
            f"model.quantization: weights in {config.model.quantization} stay on the GPU, and with pipeline.gpu=turns the "
            "trainer's leave it; remove one of them"
        )
    if str(config.trainer.get("optim", "")).startswith("paged_"):
        yield "trainer.optim: a paged optimizer moves its own state, and pipeline.gpu=turns moves it, too; use adamw_torch"
    options = config.trainer.get("model_init_kwargs")
    if isinstance(options, dict) and "flash" in str(options.get("attn_implementation", "")):
        yield (
            "trainer.model_init_kwargs.attn_implementation: with pipeline.gpu=turns the model is loaded in host memory, where "
            "flash attention does not run; use sdpa"
        )


def _of_stops(config: RunValues) -> Problems:
    sampling = config.sampling
    given = [
        name for name in ("stop", "stop_token_ids", "ignore_eos", "regex", "json_schema") if getattr(sampling, name)
    ]
    if given and any(each.factory is not None for each in config.by_environment.values()):
        yield f"sampling.{given[0]}: in an environment the chat template ends a turn; remove it"
    lasting = [name for name in ("stop", "regex", "json_schema") if getattr(sampling, name)]
    if lasting and config.weights == "adapter" and config.on_swap == "continue":
        yield (
            f"sampling.{lasting[0]}: swap.in_flight=continue cuts completions, and what lies on both sides of a cut would not be "
            "seen; set swap.in_flight=finish or restart"
        )
    if (
        sampling.ignore_eos
        and not (sampling.stop or sampling.stop_token_ids)
        and config.trainer.get("mask_truncated_completions")
    ):
        yield (
            "sampling.ignore_eos: nothing ends a completion before max_completion_length, and "
            "trainer.mask_truncated_completions would mask all of them; give sampling.stop or stop_token_ids, or remove one"
        )


def _of_evaluation(config: RunValues) -> Problems:
    if config.evaluation is None:
        return
    if not config.reward_names:
        yield "evaluation: nothing scores the answers; name reward functions, or remove the section"
    known = (WEIGHTED_SUM, *config.reward_names)
    if config.evaluation.metric not in known:
        yield f"evaluation.metric: {_unknown_reward(config.evaluation.metric, known)}"
    if any(source.answer_column is not None for source in config.evaluation.dataset.all_sources.values()):
        yield "evaluation.dataset.answer_column: answers to held-out prompts are not trained; remove the key"
    if any(source.judge is not None for source in config.evaluation.dataset.sources):
        yield "evaluation.dataset.sources: held-out prompts do not return, so nothing judges them; remove `judge`"
    if config.evaluation.dataset.curriculum is not None:
        yield "evaluation.dataset.curriculum: all held-out prompts are asked; remove the key"
    if config.evaluation.dataset.sampling != "fixed":
        yield "evaluation.dataset.sampling: all held-out prompts are asked; remove the key"
    if config.evaluation.dataset.chat_template_kwargs not in ({}, config.dataset.chat_template_kwargs):
        yield (
            "evaluation.dataset.chat_template_kwargs: prompts of both datasets are rendered alike; give them in "
            "dataset.chat_template_kwargs alone"
        )


def _of_engine_server(config: RunValues) -> Problems:
    """Yield the settings that need more than vLLM's HTTP API does or proves."""
    if config.engine:
        yield (
            "engine: these are arguments of an engine of the producer's own, and engine_server names one that is running; give "
            "them to that server as flags, and remove one of the two sections (`--set engine={}`)"
        )
    if config.weights == "merged":
        yield "swap.mode: merged changes an engine's own weights, and a server can only be given adapters; use adapter"
    if config.on_swap != "finish":
        yield (
            f"swap.in_flight: {config.on_swap} cuts requests, and a server does not return what a request that is cut has "
            "sampled; use finish"
        )
    if config.probe_every != 1:
        yield (
            f"swap.probe_every={config.probe_every}: nothing but the probe proves the weights of a server, so every version "
            "needs one; set it to 1"
        )
    if config.pipeline.gpu != "own":
        yield (
            f"pipeline.gpu: {config.pipeline.gpu} is for an engine of the producer's own, and a server takes what its flags say; "
            "use own"
        )
    if config.serve.enabled:
        yield (
            "serve.enabled: the endpoint notes what an engine of the producer's own samples for clients, which a server does not "
            "tell; remove engine_server, or serve and whatever needs it"
        )


def _unknown_reward(name: str, known: tuple[str, ...]) -> str:
    hint = nearest(name, known, "name one of them")
    return f"{name!r} is not one of the rewards of rewards.functions: {', '.join(known)}; {hint}"
