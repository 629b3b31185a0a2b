"""The events that the link tells the rest of the producer, in the order in which they happened."""

from typing import NamedTuple

from producer.policies.loader import DownloadedPolicy
from protocol.wire.messages import GpuTurn, Lease, PolicyInfo, RunPlan


class RunBegan(NamedTuple):
    """Another run, which serves `policy`. Every lease of the one before is void."""

    policy: PolicyInfo
    plan: RunPlan = RunPlan()


class SessionBegan(NamedTuple):
    """Another process of the run. Its newest version may be an older one."""

    policy: PolicyInfo
    plan: RunPlan = RunPlan()


class LeaseAbandoned(NamedTuple):
    """The trainer does not want this lease's group any more."""

    lease_id: str


class PolicyArrived(NamedTuple):
    """The newest policy is here."""

    downloaded: DownloadedPolicy


class PolicyRefused(NamedTuple):
    """The newest policy is not downloaded, for this reason."""

    policy: PolicyInfo
    reason: str


class PolicyFetched(NamedTuple):
    """The answer to a request for a policy to evaluate; None: it cannot be had."""

    policy: PolicyInfo
    downloaded: DownloadedPolicy | None


class EvaluationNoted(NamedTuple):
    """The policy that the trainer evaluates now, repeated with every heartbeat; None: it evaluates none."""

    policy: PolicyInfo | None


class TurnNoted(NamedTuple):
    """The side whose turn it is on a shared GPU, repeated with every heartbeat; None: no GPU is shared."""

    turn: GpuTurn | None


class OutboxFull(NamedTuple):
    """Sent when the outbox becomes full or has room again. While it is full, no generation may begin."""

    is_full: bool


class LinkEnded(NamedTuple):
    """The last event. Without an error the trainer has finished, or `stop` was called."""

    error: BaseException | None


LinkEvent = (
    RunBegan
    | SessionBegan
    | Lease
    | LeaseAbandoned
    | PolicyArrived
    | PolicyRefused
    | PolicyFetched
    | EvaluationNoted
    | TurnNoted
    | OutboxFull
    | LinkEnded
)
