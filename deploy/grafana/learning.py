"""The dashboard *Learning*: whether the run learns, and on data that still fits the policy."""

from grafana_foundation_sdk.builders import dashboard

from deploy.grafana.panels import SHARE, Series, band, board, graph, latest, number, quantile, total_rate


def learning() -> dashboard.Dashboard:
    reward, std = latest("rl_trainer_reward"), latest("rl_trainer_reward_std")
    above, below = "one standard deviation above", "one standard deviation below"
    steps, all_steps = latest("rl_trainer_step"), latest("rl_trainer_max_steps")
    built = board(
        "slipstream-learning",
        "Slipstream / Learning",
        "Whether the run learns, and on data that still fits the policy.",
    )
    for panel in (
        number(
            "Steps taken",
            "Optimizer steps of the run so far; when it stands still, the Pipeline dashboard says who waits for whom.",
            "short",
            Series(steps, "steps"),
        ),
        number(
            "Share of the run done",
            "Steps taken of trainer.max_steps; nothing to do.",
            SHARE,
            Series(f"{steps} / {all_steps}", "done"),
        ),
        number(
            "Epoch",
            "Pass over the dataset, counted from 0; many passes over few prompts memorize them, so add data.",
            "short",
            Series(latest("rl_trainer_epoch"), "epoch"),
        ),
        number(
            "Reward now",
            "Mean reward of what arrived for the last step; look at its course below before you judge it.",
            "short",
            Series(reward, "reward"),
        ),
        number(
            "Zero signal now",
            "Share of groups whose rewards were all equal; above a half, change the mix of prompts or use replay.",
            SHARE,
            Series(latest("rl_trainer_zero_signal_ratio"), "zero signal"),
        ),
        number(
            "Steps that were not finite",
            "Steps with a loss or gradient norm of NaN or infinity since the trainer started; any is one too "
            "many: go back to a checkpoint.",
            "short",
            Series(latest("rl_trainer_nonfinite_steps_total"), "steps"),
        ),
        band(
            graph(
                "Reward",
                "Mean weighted reward of all completions that arrived, with their spread; when it falls for "
                "long, go back to a checkpoint with a lower learning rate.",
                "short",
                Series(reward, "reward"),
                Series(f"{reward} + {std}", above),
                Series(f"{reward} - {std}", below),
                least=None,
            ),
            above,
            below,
        ),
        graph(
            "Score on held-out prompts",
            "Of the last evaluation, and the best; when it falls while the reward rises, the run overfits or games the reward: "
            "take checkpoints/best.",
            "short",
            Series(latest("rl_trainer_evaluation_score"), "score"),
            Series(latest("rl_trainer_evaluation_best_score"), "best"),
            least=None,
        ),
        graph(
            "Reward by function",
            "Unweighted mean of each reward function; when one rises while the one you care about falls, lower "
            "its weight.",
            "short",
            Series(latest("rl_trainer_reward_by_function", "function"), "{{function}}"),
            least=None,
        ),
        graph(
            "Solve rate by attempt",
            "Share of judged completions that succeeded, by the attempt at their prompt; when attempt 2 stays "
            "near 0, raise reroll.delay_versions.",
            SHARE,
            Series(
                f"{total_rate('rl_trainer_completions_solved_total', 'attempt')}"
                f" / {total_rate('rl_trainer_completions_scored_total', 'attempt')}",
                "attempt {{attempt}}",
            ),
            most=1,
        ),
        graph(
            "Groups without signal",
            "Share of arrived groups with equal rewards, and of the batch that was replayed for them; when the "
            "first is high, the task is too easy or too hard.",
            SHARE,
            Series(latest("rl_trainer_zero_signal_ratio"), "zero signal"),
            Series(latest("rl_trainer_replayed_ratio"), "replayed"),
            most=1,
        ),
        graph(
            "Entropy",
            "Mean entropy per token; when it falls towards 0 before the task is solved, exploration has ended: "
            "lower the learning rate or raise epsilon_high.",
            "suffix: nats",
            Series(latest("rl_trainer_entropy_nats"), "entropy"),
        ),
        graph(
            "KL divergence",
            "Per token, to the policy that sampled; when it grows without end, the data is too old for the "
            "learning rate: lower either.",
            "suffix: nats",
            Series(latest("rl_trainer_sampling_kl_nats"), "to the sampling policy"),
            Series(latest("rl_trainer_reference_kl_nats"), "to the reference model"),
            least=None,
        ),
        graph(
            "Importance ratio",
            "Quantiles over the tokens before correction; far from 1 on fresh data, trainer and engine "
            "disagree: compare their dtypes.",
            "short",
            Series(latest("rl_trainer_importance_ratio", "quantile"), "quantile {{quantile}}"),
            Series(latest("rl_trainer_importance_ratio_mean"), "mean"),
            Series(latest("rl_trainer_importance_ratio_max"), "greatest"),
        ),
        graph(
            "Effective sample size",
            "Share of the tokens that still count after weighting; below a half, lower pipeline.max_staleness "
            "or the learning rate.",
            SHARE,
            Series(latest("rl_trainer_effective_sample_ratio"), "effective sample size"),
            most=1,
        ),
        graph(
            "Clipped and masked tokens",
            "Share of tokens at which correction or loss steps in; when it exceeds a tenth for long, steps are "
            "too big or data is too old.",
            SHARE,
            Series(latest("rl_trainer_ratio_clipped_ratio"), "bounded by the correction"),
            Series(latest("rl_trainer_ratio_masked_ratio"), "masked by the correction"),
            Series(latest("rl_trainer_policy_clip_ratio"), "clipped by the loss"),
            most=1,
        ),
        graph(
            "Gradient norm",
            "Before clipping, as last logged; spikes that grow end in NaN: lower the learning rate or "
            "trainer.max_grad_norm.",
            "short",
            Series(latest("rl_trainer_gradient_norm"), "gradient norm"),
        ),
        graph(
            "Loss",
            "As last logged; its level says little in reinforcement learning, so look at jumps only.",
            "short",
            Series(latest("rl_trainer_loss"), "loss"),
            least=None,
        ),
        graph(
            "Learning rate",
            "As last logged; when it is not what you planned, check trainer.lr_scheduler_type and max_steps.",
            "sci",
            Series(latest("rl_trainer_learning_rate"), "learning rate"),
        ),
        graph(
            "Completion length",
            "Of what arrived for the last step; when it only ever grows, the reward pays for length: see "
            "advantage.overlong_buffer_tokens.",
            "suffix: tok",
            Series(latest("rl_trainer_completion_length_mean_tokens"), "mean"),
            Series(latest("rl_trainer_completion_length_max_tokens"), "greatest"),
        ),
        graph(
            "Truncated completions",
            "Share that reached sampling.max_completion_length; above a quarter, raise it or punish length.",
            SHARE,
            Series(latest("rl_trainer_completions_truncated_ratio"), "truncated"),
            most=1,
        ),
        graph(
            "Staleness",
            "Of groups trained for the first time, in versions; at its bound all the time, producers are ahead: "
            "see the Pipeline dashboard.",
            "suffix: versions",
            Series(latest("rl_trainer_staleness_mean_versions"), "mean"),
            Series(latest("rl_trainer_staleness_max_versions"), "greatest"),
            Series(quantile(0.9, "rl_trainer_staleness_versions"), "quantile 0.9"),
            Series(latest("rl_trainer_max_staleness_versions"), "bound"),
        ),
    ):
        built = built.with_panel(panel)
    return built
