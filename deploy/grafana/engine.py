"""The dashboard *Producer engine*: how vLLM and the reward functions of the producers fare."""

from grafana_foundation_sdk.builders import dashboard

from deploy.grafana.panels import (
    SHARE,
    TOKENS_PER_SECOND,
    Series,
    board,
    by_producer,
    graph,
    of_run,
    producer_quantile,
    rate,
)


def engine() -> dashboard.Dashboard:
    def of_engine(metric: str) -> str:
        """An engine may be several of vLLM's own."""
        return by_producer(of_run(metric))

    hits, queries = rate("vllm:prefix_cache_hits_total"), rate("vllm:prefix_cache_queries_total")
    completions = by_producer(rate("rl_producer_completions_total"))
    built = board(
        "slipstream-producer-engine",
        "Slipstream / Producer engine",
        "How vLLM and the reward functions of the producers fare.",
        producers=True,
    )
    for panel in (
        graph(
            "Tokens out",
            "Tokens generated per second; when it falls while requests run, look at preemptions, at lengths and "
            "at what else uses the GPU.",
            TOKENS_PER_SECOND,
            Series(by_producer(rate("rl_producer_completion_tokens_total")), "{{producer}}"),
        ),
        graph(
            "Tokens in",
            "Tokens of prompts per second, once per group; when they rival what is generated, prompts are long: "
            "see that prefix caching is on.",
            TOKENS_PER_SECOND,
            Series(by_producer(rate("rl_producer_prompt_tokens_total")), "{{producer}}"),
        ),
        graph(
            "Requests in the engine",
            "Running and waiting in vLLM; many that wait mean too little KV cache, none that run mean no leases.",
            "short",
            Series(of_engine("vllm:num_requests_running"), "{{producer}} running"),
            Series(of_engine("vllm:num_requests_waiting"), "{{producer}} waiting"),
        ),
        graph(
            "KV cache in use",
            "Share of vLLM's KV cache; when it stays near 1, raise engine.gpu_memory_utilization for more requests at once.",
            SHARE,
            Series(by_producer(of_run("vllm:kv_cache_usage_perc"), aggregate="max"), "{{producer}}"),
            most=1,
        ),
        graph(
            "Preemptions",
            "Requests per second that vLLM threw out and computes again for want of KV cache; the group limit falls then. "
            "Where it stays up although the limit is 1, the cache holds no whole group: raise engine.gpu_memory_utilization.",
            "suffix: requests/s",
            Series(by_producer(rate("vllm:num_preemptions_total")), "{{producer}}"),
        ),
        graph(
            "Group limit",
            "Groups that may be in the engine at once, and those that are; the limit falls when vLLM preempts and climbs "
            "back while the KV cache has room. Far below engine.max_num_seqs for long, more KV cache would pay.",
            "short",
            Series(by_producer(of_run("rl_producer_group_limit")), "{{producer}} limit"),
            Series(by_producer(of_run("rl_producer_leases", 'stage="generating"')), "{{producer}} in the engine"),
        ),
        graph(
            "Prefix cache hits",
            "Share of prompt tokens found in the cache; a group shares its prompt, so that a low share means it "
            "is too small or off.",
            SHARE,
            Series(f"{by_producer(hits)} / {by_producer(queries)}", "{{producer}}"),
            most=1,
        ),
        graph(
            "Generation of a group",
            "Time of a group in the engine; when p99 nears pipeline.lease_timeout_s, leases expire: lower "
            "max_completion_length or raise it.",
            "s",
            Series(producer_quantile(0.5, "rl_producer_generation_seconds"), "{{producer}} p50"),
            Series(producer_quantile(0.99, "rl_producer_generation_seconds"), "{{producer}} p99"),
        ),
        graph(
            "Rewards of a group",
            "Time of all reward functions over a group; when it nears that of generation, raise rewards.num_workers.",
            "s",
            Series(producer_quantile(0.5, "rl_producer_reward_seconds"), "{{producer}} p50"),
            Series(producer_quantile(0.99, "rl_producer_reward_seconds"), "{{producer}} p99"),
        ),
        graph(
            "Reward workers",
            "Reward processes at work and free; when none is ever free, raise rewards.num_workers.",
            "short",
            Series(by_producer(of_run("rl_producer_reward_workers"), "state"), "{{producer}} {{state}}"),
        ),
        graph(
            "Completion length",
            "Of what this producer generated; when p99 sits at max_completion_length, completions are cut off.",
            "suffix: tok",
            Series(producer_quantile(0.5, "rl_producer_completion_length_tokens"), "{{producer}} p50"),
            Series(producer_quantile(0.99, "rl_producer_completion_length_tokens"), "{{producer}} p99"),
        ),
        graph(
            "Truncated completions",
            "Share that reached max_completion_length; above a quarter, raise it or punish length.",
            SHARE,
            Series(f"{by_producer(rate('rl_producer_completions_truncated_total'))} / {completions}", "{{producer}}"),
            most=1,
        ),
        graph(
            "Leases by stage",
            "Prompts in hand; waiting ones wait for a policy or for room in the engine, unacknowledged ones for "
            "the trainer's journal.",
            "short",
            Series(by_producer(of_run("rl_producer_leases"), "stage"), "{{producer}} {{stage}}"),
        ),
        graph(
            "Leases that came to nothing",
            "Failed, ran into their deadline (some of the failed), or were no longer wanted; the producer's log "
            "has the cause.",
            "suffix: leases/s",
            Series(by_producer(rate("rl_producer_leases_failed_total")), "{{producer}} failed"),
            Series(by_producer(rate("rl_producer_leases_timed_out_total")), "{{producer}} timed out"),
            Series(by_producer(rate("rl_producer_leases_abandoned_total")), "{{producer}} abandoned"),
        ),
        graph(
            "Not acknowledged",
            "Bytes of groups that the trainer has not confirmed; generation pauses at "
            "transport.max_unacked_bytes: look at the trainer's disk.",
            "bytes",
            Series(by_producer(of_run("rl_producer_unacked_bytes")), "{{producer}}"),
        ),
        graph(
            "Paused",
            "1 while generation pauses for want of acknowledgements; when it happens at all, the trainer or its "
            "disk is too slow.",
            "bool_yes_no",
            Series(by_producer(of_run("rl_producer_paused")), "{{producer}}"),
            most=1,
        ),
        graph(
            "Memory",
            "Resident memory of the producer with engine and reward workers; when it climbs without end, a "
            "reward function leaks.",
            "bytes",
            Series(by_producer(of_run("rl_producer_resident_memory_bytes")), "{{producer}}"),
        ),
        graph(
            "GPU memory",
            "In use on each GPU, by whatever process, and all there is; when they meet, lower "
            "engine.gpu_memory_utilization.",
            "bytes",
            Series(by_producer(of_run("rl_producer_gpu_memory_used_bytes"), "gpu"), "{{producer}} GPU {{gpu}}"),
            Series(
                by_producer(of_run("rl_producer_gpu_memory_total_bytes"), "gpu"), "{{producer}} GPU {{gpu}}, all of it"
            ),
        ),
    ):
        built = built.with_panel(panel)
    return built
