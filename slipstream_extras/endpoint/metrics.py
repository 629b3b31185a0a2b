"""The endpoint's Prometheus metrics.

Guarantee: every outcome and every reason of a refusal has a sample from the start.
"""

from collections import Counter
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Histogram

from producer.metrics import GENERATION_BUCKETS_S
from protocol.runtime.metrics import Readings
from slipstream_extras.endpoint.agents import Agents
from slipstream_extras.endpoint.openai import REASONS, EndpointPlugin, Reason
from slipstream_extras.endpoint.versions import ClientLimiter

RequestOutcome = Literal["completed", "refused", "timed_out", "client_gone", "failed"]
OUTCOMES: tuple[RequestOutcome, ...] = get_args(RequestOutcome)


class ServeMetrics:
    """Counts of requests as they end. `refused` also counts connections that never became a request."""

    def __init__(
        self,
        registry: CollectorRegistry,
        limiter: ClientLimiter,
        agents: Agents | None = None,
        plugin: EndpointPlugin | None = None,
    ) -> None:
        self.refused: Counter[Reason] = Counter()
        self.outcomes: Counter[RequestOutcome] = Counter()
        self.prompt_tokens = self.completion_tokens = 0
        self._seconds = Histogram(
            "rl_producer_serve_request_seconds", "Time of a client's request, of any outcome; only with serve.enabled.",
            buckets=GENERATION_BUCKETS_S, registry=registry,
        )  # fmt: skip
        readings = Readings(registry)
        readings.counters(
            "rl_producer_serve_requests_total",
            "Requests of clients to the endpoint.",
            "outcome",
            lambda: {str(outcome): self.outcomes[outcome] for outcome in OUTCOMES},
        )
        readings.counters(
            "rl_producer_serve_refused_total",
            "Requests and connections that the endpoint refused.",
            "reason",
            lambda: {str(reason): self.refused[reason] for reason in REASONS},
        )
        readings.counters(
            "rl_producer_serve_tokens_total",
            "Tokens of clients' prompts, and tokens generated for them.",
            "kind",
            lambda: {"prompt": self.prompt_tokens, "completion": self.completion_tokens},
        )
        readings.gauges(
            "rl_producer_serve_completions",
            "Completions for clients, and requests that wait.",
            "state",
            lambda: {"generating": limiter.taken, "waiting": limiter.num_waiting},
        )
        if agents is not None:
            _watch_agents(readings, agents)
        if plugin is not None:
            plugin.watch(readings)

    def refuse(self, reason: Reason) -> None:
        self.refused[reason] += 1

    def ended(self, outcome: RequestOutcome, seconds: float) -> None:
        self.outcomes[outcome] += 1
        self._seconds.observe(seconds)


def _watch_agents(readings: Readings, agents: Agents) -> None:
    readings.counters(
        "rl_producer_serve_episodes_total",
        "Episodes of tasks that agents took.",
        "outcome",
        lambda: {"rewarded": agents.rewarded, "unrewarded": agents.unrewarded, "failed": agents.failed},
    )
    readings.gauge(
        "rl_producer_serve_waiting_tasks",
        "Tasks that wait for an agent.",
        lambda: agents.num_waiting,
    )
