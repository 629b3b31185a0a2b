"""The dashboard *Pipeline*: who waits for whom, what waits where, how old the data is, and how long things take."""

from grafana_foundation_sdk.builders import dashboard

from deploy.grafana.panels import (
    SHARE,
    TOKENS_PER_SECOND,
    Series,
    board,
    distribution,
    graph,
    latest,
    of_run,
    quantile,
    total_rate,
)


def pipeline() -> dashboard.Dashboard:
    wait, step = total_rate("rl_trainer_wait_seconds_total"), total_rate("rl_trainer_step_seconds_sum")
    busy, idle = total_rate("rl_producer_busy_seconds_total"), total_rate("rl_producer_idle_seconds_total")
    built = board(
        "slipstream-pipeline",
        "Slipstream / Pipeline",
        "Who waits for whom, what waits where, how old the data is, and how long things take.",
    )
    for panel in (
        graph(
            "Trainer's time",
            "Share of the trainer's time in steps and in waiting for rollouts; when it mostly waits, add a "
            "producer or raise pipeline.max_staleness.",
            SHARE,
            Series(f"{step} / ({step} + {wait})", "training"),
            Series(f"{wait} / ({step} + {wait})", "waiting for rollouts"),
            stacked=True,
            most=1,
        ),
        graph(
            "Producers' time",
            "Share of the producers' time with and without requests in the engine; when they mostly idle, "
            "training is the bottleneck: more data per step or fewer producers.",
            SHARE,
            Series(f"{busy} / ({busy} + {idle})", "generating"),
            Series(f"{idle} / ({busy} + {idle})", "idle"),
            stacked=True,
            most=1,
        ),
        graph(
            "Waiting now",
            "How long the trainer has been waiting for its next batch; when it only grows, look at the leases "
            "and at the producers' logs.",
            "s",
            Series(latest("rl_trainer_waiting_seconds"), "waiting"),
        ),
        graph(
            "Tokens",
            "Generated and trained per second; what is generated and never trained had no signal or came too late.",
            TOKENS_PER_SECOND,
            Series(total_rate("rl_trainer_tokens_generated_total"), "generated"),
            Series(total_rate("rl_trainer_tokens_trained_total"), "trained"),
        ),
        graph(
            "Leases",
            "Prompts that producers hold, by where they are; when all of them wait for room in the engine or "
            "for the trainer's acknowledgement, that is the bottleneck.",
            "short",
            Series(latest("rl_trainer_leases_out"), "held, as the trainer knows"),
            Series(f"sum by (stage) ({of_run('rl_producer_leases')})", "{{stage}}"),
        ),
        graph(
            "Queues",
            "Groups and prompts that wait at the trainer; unwritten ones that do not go away mean a slow or full disk.",
            "short",
            Series(latest("rl_trainer_groups_ready"), "ready to be trained"),
            Series(latest("rl_trainer_arrivals_unwritten"), "not in the journal yet"),
            Series(latest("rl_trainer_groups_replayable"), "may be replayed"),
            Series(latest("rl_trainer_rerolls_waiting"), "prompts that will return"),
        ),
        graph(
            "Outcomes of groups",
            "Groups that arrived, by what became of them; stale ones are wasted work: raise "
            "pipeline.max_staleness or take fewer producers.",
            "suffix: groups/s",
            Series(total_rate("rl_trainer_groups_received_total", "outcome"), "{{outcome}}"),
            Series(total_rate("rl_trainer_groups_went_stale_total"), "went stale in the queue"),
            stacked=True,
        ),
        graph(
            "Groups trained",
            "Per second, for the first time or replayed; when the second outweighs the first, prompts "
            "hardly have signal.",
            "suffix: groups/s",
            Series(total_rate("rl_trainer_groups_trained_total"), "for the first time"),
            Series(total_rate("rl_trainer_groups_replayed_total"), "again"),
            stacked=True,
        ),
        graph(
            "Leases without a group",
            "Leases that failed, by reason; rewards and prompts that fail are yours to mend, expired and "
            "released ones come from lost producers.",
            "suffix: leases/s",
            Series(total_rate("rl_trainer_leases_failed_total", "reason"), "{{reason}}"),
            stacked=True,
        ),
        distribution(
            "Staleness of groups",
            "Age in versions of the groups trained for the first time; when all of them are at the bound, it is "
            "the bound that holds producers back.",
            "rl_trainer_staleness_versions",
            "suffix: versions",
        ),
        graph(
            "Versions",
            "Newest published policy version and those that producers serve; when a gap grows, a producer "
            "cannot load adapters: see its log.",
            "short",
            Series(latest("rl_trainer_policy_version"), "published"),
            Series(latest("rl_trainer_producer_policy_version", "producer"), "{{producer}}"),
            least=None,
        ),
        graph(
            "Lag of producers",
            "Versions by which each producer is behind; when it stays above pipeline.max_staleness its groups "
            "come too late.",
            "suffix: versions",
            Series(latest("rl_trainer_producer_lag_versions", "producer"), "{{producer}}"),
        ),
        graph(
            "Swap",
            "From the announcement of a version until requests start on it, and the part of it after the last "
            "byte; when the first grows alone, the network is slow.",
            "s",
            Series(quantile(0.5, "rl_producer_swap_seconds"), "p50"),
            Series(quantile(0.99, "rl_producer_swap_seconds"), "p99"),
            Series(quantile(0.99, "rl_producer_adapter_load_seconds"), "p99 of loading"),
        ),
        graph(
            "Swaps",
            "Versions that went live and versions that could not be loaded; any refused one leaves its producer "
            "behind: see its log.",
            "suffix: swaps/s",
            Series(total_rate("rl_producer_swaps_total", "outcome"), "{{outcome}}"),
        ),
        graph(
            "Optimizer step",
            "Duration of a step with publication, without waiting; when it grows, look at completion lengths "
            "and at what else runs on the GPU.",
            "s",
            Series(quantile(0.5, "rl_trainer_step_seconds"), "p50"),
            Series(quantile(0.99, "rl_trainer_step_seconds"), "p99"),
        ),
        graph(
            "Journal commit",
            "Duration of durable commits, which groups wait for before they are acknowledged; above 0.1 s the "
            "disk is too slow or shared.",
            "s",
            Series(quantile(0.5, "rl_trainer_journal_commit_seconds"), "p50"),
            Series(quantile(0.99, "rl_trainer_journal_commit_seconds"), "p99"),
        ),
        graph(
            "Disk",
            "Share of run_dir's disk in use and the share at which no leases are given; when they meet, make "
            "room: the run goes on by itself.",
            SHARE,
            Series(latest("rl_trainer_disk_used_ratio"), "in use"),
            Series(latest("rl_trainer_disk_used_limit_ratio"), "limit"),
            most=1,
        ),
        graph(
            "Journal",
            "Size of the journal's files; when it grows without end, lower replay.keep_bytes or save "
            "checkpoints more often.",
            "bytes",
            Series(latest("rl_trainer_journal_bytes"), "journal"),
        ),
        graph(
            "Given up",
            "Prompts given up, groups quarantined and frames refused since the run began; slipstream journal quarantine "
            "lists them with reasons.",
            "short",
            Series(latest("rl_trainer_dead_letters_total"), "dead letters"),
            Series(latest("rl_trainer_groups_quarantined_total"), "groups quarantined"),
            Series(latest("rl_trainer_frames_refused_total"), "frames refused"),
        ),
        graph(
            "Rerolls",
            "Prompts put off after every completion failed, leased again, and sent to rest as solved; when "
            "nothing but rest is left, the data is learned.",
            "suffix: prompts/s",
            Series(total_rate("rl_trainer_rerolls_deferred_total"), "put off"),
            Series(total_rate("rl_trainer_rerolls_leased_total"), "leased again"),
            Series(total_rate("rl_trainer_prompts_rested_total"), "sent to rest"),
        ),
        graph(
            "Trainer's memory",
            "Resident memory of the trainer and its children, and memory of its GPUs; when it climbs from step "
            "to step, lower pipeline.trainer_tokens_per_micro_batch.",
            "bytes",
            Series(latest("rl_trainer_resident_memory_bytes"), "resident"),
            Series(latest("rl_trainer_gpu_memory_used_bytes", "gpu"), "GPU {{gpu}}"),
            Series(latest("rl_trainer_gpu_memory_total_bytes", "gpu"), "GPU {{gpu}}, all of it"),
        ),
    ):
        built = built.with_panel(panel)
    return built
