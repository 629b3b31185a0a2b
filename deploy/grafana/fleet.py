"""The dashboard *Fleet*: every producer of a run beside the others."""

from grafana_foundation_sdk.builders import dashboard

from deploy.grafana.panels import (
    SHARE,
    TOKENS_PER_SECOND,
    Column,
    Series,
    board,
    by_producer,
    graph,
    latest,
    number,
    of_run,
    overview,
    producer_quantile,
    rate,
    total_rate,
)


def fleet() -> dashboard.Dashboard:
    def as_trainer_knows(metric: str) -> str:
        chosen = of_run(metric, 'producer=~"$producer"')
        return f"max by (producer) ({chosen})"

    tokens = by_producer(rate("rl_producer_completion_tokens_total"))
    idle, busy = (
        by_producer(rate("rl_producer_idle_seconds_total")),
        by_producer(rate("rl_producer_busy_seconds_total")),
    )
    idle_share = f"{idle} / ({idle} + {busy})"
    version = as_trainer_knows("rl_trainer_producer_policy_version")
    lag = as_trainer_knows("rl_trainer_producer_lag_versions")
    leases = as_trainer_knows("rl_trainer_producer_leases")
    heard = as_trainer_knows("rl_trainer_producer_heard_seconds")
    # Not `up`, which has the labels of the target alone.
    producers_up, trainer_up = of_run("rl_producer_info"), of_run("rl_trainer_info")
    built = board(
        "slipstream-fleet", "Slipstream / Fleet", "Every producer of a run beside the others.", producers=True
    )
    for panel in (
        number(
            "Connected producers",
            "Producers that the trainer hears; when some are missing, look at their units and logs.",
            "short",
            Series(latest("rl_trainer_producers_connected"), "connected"),
        ),
        number(
            "Scraped producers",
            "Producers whose metrics Prometheus can read; fewer than are connected, its discovery misses some.",
            "short",
            Series(f"sum({producers_up})", "scraped"),
        ),
        number(
            "Trainer up",
            "Whether Prometheus can read the trainer's metrics; when not, it has stopped or hangs: see its unit "
            "and log.",
            "bool_yes_no",
            Series(f"max({trainer_up}) or vector(0)", "up"),
        ),
        number(
            "Failing checks",
            "Checks of /healthz that fail at any daemon of the run; that address gives the reasons in words.",
            "short",
            Series(
                f"sum({of_run('rl_trainer_check_failing')}) + sum({of_run('rl_producer_check_failing')})",
                "failing",
            ),
        ),
        number(
            "Newest version",
            "Policy version that the trainer published last; compare it with those below.",
            "short",
            Series(latest("rl_trainer_policy_version"), "version"),
        ),
        number(
            "Tokens of the fleet",
            "Tokens per second of all chosen producers; when it falls with a constant fleet, look at who fell "
            "behind below.",
            TOKENS_PER_SECOND,
            Series(f"sum({tokens})", "tokens"),
        ),
        overview(
            "Producers",
            "Each connected producer now; one that lags, idles or is not heard while the others work is the one "
            "to look at.",
            Column("version", version, "none"),
            Column("lag", lag, "none"),
            Column("leases", leases, "none"),
            Column("heard ago", heard, "s"),
            Column("tokens/s", tokens, "short"),
            Column("idle", idle_share, SHARE),
            Column("p99 of generation", producer_quantile(0.99, "rl_producer_generation_seconds"), "s"),
        ),
        graph(
            "Version of each producer",
            "Policy version that each serves, -1 while none; one that stands still cannot load adapters: see its log.",
            "short",
            Series(version, "{{producer}}"),
            least=None,
        ),
        graph(
            "Lag of each producer",
            "Versions behind the newest; when it stays above pipeline.max_staleness that producer's groups come "
            "too late.",
            "suffix: versions",
            Series(lag, "{{producer}}"),
        ),
        graph(
            "Leases of each producer",
            "Prompts that each holds; one without any while others are full is starved or disconnected.",
            "short",
            Series(leases, "{{producer}}"),
        ),
        graph(
            "Tokens of each producer",
            "Generated per second; one far below its equals has a slower or shared GPU.",
            TOKENS_PER_SECOND,
            Series(tokens, "{{producer}}"),
        ),
        graph(
            "Idle share of each producer",
            "Share of its connected time without requests in the engine; when all idle, there are too many of them.",
            SHARE,
            Series(idle_share, "{{producer}}"),
            most=1,
        ),
        graph(
            "Heard ago",
            "Time since the trainer last heard each producer; beyond transport.heartbeat_timeout_s it is given "
            "up: look at the network.",
            "s",
            Series(heard, "{{producer}}"),
        ),
        graph(
            "Up",
            "Whose metrics Prometheus can read; one whose line ends has stopped, crashed or hangs: see its unit and log.",
            "bool_yes_no",
            Series(trainer_up, "rl-trainer {{instance}}"),
            Series(producers_up, "rl-producer {{instance}}"),
            most=1,
        ),
        graph(
            "Connected",
            "Whether each producer says that it has a trainer; when not while the trainer is up, compare their "
            "endpoints.",
            "bool_yes_no",
            Series(by_producer(of_run("rl_producer_connected")), "{{producer}}"),
            most=1,
        ),
        graph(
            "Swap of each producer",
            "Quantile 0.99 from the announcement of a version until requests start on it; one far above its "
            "equals has a slow network.",
            "s",
            Series(producer_quantile(0.99, "rl_producer_swap_seconds"), "{{producer}}"),
        ),
        graph(
            "Where policies come from",
            "Policies per second that producers got from a file or the cache of their host, a relay or the trainer; "
            "with relays, few should come from the trainer.",
            "suffix: policies/s",
            Series(total_rate("rl_producer_policy_downloads_total", "source"), "{{source}}"),
            stacked=True,
        ),
        graph(
            "Relays that were left",
            "Downloads per second that went on elsewhere, by what was wrong with the relay; slow ones have a slow "
            "link, wrong ones a broken disk or memory.",
            "suffix: downloads/s",
            Series(total_rate("rl_producer_relays_left_total", "reason"), "{{reason}}"),
            stacked=True,
        ),
        graph(
            "Refused connections and messages",
            "Connections and messages per second that the trainer refused, by reason; see docs/security.md "
            "for what each of them means.",
            "suffix: refusals/s",
            Series(total_rate("rl_trainer_connections_refused_total", "reason"), "{{reason}}"),
            stacked=True,
        ),
    ):
        built = built.with_panel(panel)
    return built
