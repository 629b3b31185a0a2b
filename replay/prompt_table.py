"""The table of prompts that want an answer, and the leases on them: one mechanism for training and for evaluations.

Guarantee: a prompt has one status. It is with one producer at a time; a lease that ends without an answer makes it wait again,
for as long as the failure calls for, until its budget for failures of that class is spent. Every reason has a class: a *data*
failure is the prompt's own (its reward raises, it is malformed); an *infra* failure would have hit any prompt (a producer died, a
lease expired).

    Waiting -> Leased              lease
    Leased  -> Waiting             fail, give_back
    Leased  -> not in the table    fail, once the budget is spent
    any     -> any                 put, remove: as its owner decides

The cost of a lease does not grow with the number of leases or of producers, and only logarithmically with the number of prompts
that wait or are deferred.
"""

import heapq
import itertools
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar

FailureClass = Literal["data", "infra"]
_DATA = ("prompt_too_long", "bad_prompt", "reward_failed", "environment_failed")
_HOPELESS = ("prompt_too_long", "bad_prompt")
_MAX_BACKOFF_S = 60.0


def failure_class(reason: str) -> FailureClass:
    return "data" if reason in _DATA else "infra"


def is_hopeless(reason: str) -> bool:
    """Return whether another attempt would fail in the same way."""
    return reason in _HOPELESS


@dataclass(frozen=True)
class RetryBudget:
    """The number of attempts of a prompt that may fail, and the wait after each."""

    max_attempts: int
    backoff_s: float

    def delay_s(self, failures: int) -> float:
        """The wait after failure number `failures` (from 1): doubling, at most a minute."""
        return min(_MAX_BACKOFF_S, self.backoff_s * 2.0 ** min(failures - 1, 30))


K = TypeVar("K", bound=Hashable)

_MOST_ENDED = 256  # entries of a heap for what has ended, beyond as many as there are for what has not


@dataclass(frozen=True)
class PromptTask(Generic[K]):
    """A prompt that wants an answer, how often it was leased, and how many of its leases failed."""

    key: K
    min_version: int = 0  # no older policy may answer it
    attempt: int = 0  # leases so far
    data_failures: int = 0
    infra_failures: int = 0

    def failures(self, of: FailureClass) -> int:
        return self.data_failures if of == "data" else self.infra_failures

    def failed(self, of: FailureClass) -> "PromptTask[K]":
        return replace(self, **{f"{of}_failures": self.failures(of) + 1})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Waiting:
    """The prompt is leased next, those that wait longest first."""

    not_before: float = 0.0


@dataclass(frozen=True)
class Leased:
    """A producer has the prompt."""


@dataclass(frozen=True)
class Held:
    """The prompt's group is here and is not trained yet."""

    verdict: str  # of `replay.rerolls`
    policy_version: int  # of the group


@dataclass(frozen=True)
class Deferred:
    """The prompt returns when its `min_version` is published."""


Status = Waiting | Leased | Held | Deferred


@dataclass(frozen=True)
class LeaseRecord(Generic[K]):
    lease_id: str
    task: PromptTask[K]
    producer: str
    policy_floor: int  # the oldest policy that may answer
    deadline: float  # of the caller's clock, seconds


class _Place(NamedTuple):
    """The place of a key in a `DueQueue`, and the time from which it is due."""

    number: int
    not_before: float
    min_version: int


class DueQueue(Generic[K]):
    """A queue that gives the first key whose time has come and whose version is published. Queues with the same `numbers` tell
    by `number` who came first."""

    def __init__(self, numbers: Iterator[int] | None = None) -> None:
        self._numbers = numbers or itertools.count()
        self._places: dict[K, _Place] = {}
        # Heaps. Each key is in one of them with its number; entries with other numbers are of keys that left.
        self._later: list[tuple[float, int, K]] = []  # by time
        self._unpublished: list[tuple[int, int, K]] = []  # by version
        self._due: list[tuple[int, K]] = []

    def add(self, key: K, not_before: float, min_version: int) -> None:
        """Put a key that is not in the queue to its end."""
        place = self._places[key] = _Place(next(self._numbers), not_before, min_version)
        self._file(place.number, key, -math.inf, -1)
        if len(self._later) + len(self._unpublished) + len(self._due) > 2 * len(self._places) + _MOST_ENDED:
            self._later = [(each.not_before, each.number, key) for key, each in self._places.items()]
            heapq.heapify(self._later)
            self._unpublished, self._due = [], []

    def remove(self, key: K) -> None:
        del self._places[key]

    def __len__(self) -> int:
        return len(self._places)

    def number(self, key: K) -> int:
        return self._places[key].number

    def first(self, now: float, version: int) -> K | None:
        """The first key that is due at `now`, when `version` is the newest; None if none is. It stays in the queue."""
        while self._later and self._later[0][0] <= now:
            self._file(*heapq.heappop(self._later)[1:], now, version)
        while self._unpublished and self._unpublished[0][0] <= version:
            self._file(*heapq.heappop(self._unpublished)[1:], now, version)
        while self._due:
            number, key = self._due[0]
            place = self._places.get(key)
            if place and place.number == number and place.not_before <= now and place.min_version <= version:
                return key
            self._file(*heapq.heappop(self._due), now, version)
        return None

    def _file(self, number: int, key: K, now: float, version: int) -> None:
        """Put an entry that is in no heap to the one where it belongs."""
        place = self._places.get(key)
        if place is None or place.number != number:
            return
        if place.not_before > now:
            heapq.heappush(self._later, (place.not_before, number, key))
        elif place.min_version > version:
            heapq.heappush(self._unpublished, (place.min_version, number, key))
        else:
            heapq.heappush(self._due, (number, key))


class PromptTable(Generic[K]):
    """Prompts with their statuses and leases. Times are of the caller's clock, in seconds. Prompts wait in lanes, as `lane_of`
    tells.

    Attributes:
        in_lane: the leases of each lane.
    """

    def __init__(
        self, budgets: Mapping[FailureClass, RetryBudget], lane_of: Callable[[K], str] = lambda key: ""
    ) -> None:
        self._budgets = budgets
        self._lane_of = lane_of
        self.in_lane: Counter[str] = Counter()
        self._prompts: dict[K, tuple[PromptTask[K], Status]] = {}
        self._order: dict[type[Status], OrderedDict[K, None]] = {
            kind: OrderedDict() for kind in (Waiting, Leased, Held, Deferred)
        }
        numbers = itertools.count()
        self._waiting: defaultdict[str, DueQueue[K]] = defaultdict(lambda: DueQueue(numbers))
        self._deferred: DueQueue[K] = DueQueue()
        self._leases: dict[str, LeaseRecord[K]] = {}
        self._by_producer: defaultdict[str, dict[str, LeaseRecord[K]]] = defaultdict(dict)
        self._by_key: defaultdict[K, dict[str, LeaseRecord[K]]] = defaultdict(dict)
        self._deadlines: list[tuple[float, str]] = []  # a heap; has those of leases that ended, too

    def status(self, key: K) -> Status | None:
        """Return the status; None if the prompt is not in the table: it was never leased, or is done."""
        return self._prompts[key][1] if key in self._prompts else None

    def task(self, key: K) -> PromptTask[K]:
        """Return the task of a prompt; a new one if the prompt is not in the table."""
        return self._prompts[key][0] if key in self._prompts else PromptTask(key)

    def keys(self, *kinds: type[Status]) -> list[K]:
        """The prompts of these statuses, one status after the other, each in the order in which they came to it."""
        return [key for kind in kinds for key in self._order[kind]]

    def first(self, kind: type[Status]) -> K:
        """The prompt that came to this status, which some prompt has, before all others."""
        return next(iter(self._order[kind]))

    def count(self, kind: type[Status]) -> int:
        return len(self._order[kind])

    def is_open(self, key: K) -> bool:
        """Return whether the prompt wants an answer now."""
        return isinstance(self.status(key), (Waiting, Leased))

    def put(self, task: PromptTask[K], status: Status) -> None:
        """The prompt has this status from now on."""
        if task.key in self._prompts:
            self.remove(task.key)
        self._prompts[task.key] = (task, status)
        self._order[type(status)][task.key] = None
        if isinstance(status, Waiting):
            self._waiting[self._lane_of(task.key)].add(task.key, status.not_before, task.min_version)
        elif isinstance(status, Deferred):
            self._deferred.add(task.key, -math.inf, task.min_version)

    def remove(self, key: K) -> Status:
        """The prompt leaves the table. A lease that is still out stays one until it ends."""
        _, status = self._prompts.pop(key)
        del self._order[type(status)][key]
        if isinstance(status, Waiting):
            self._waiting[self._lane_of(key)].remove(key)
        elif isinstance(status, Deferred):
            self._deferred.remove(key)
        return status

    # Leases

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def next_waiting(self, now: float, version: int, without: Collection[str] = ()) -> PromptTask[K] | None:
        """The prompt to lease next, if one is due in a lane that is not in `without`; `version` is the newest policy."""
        lanes = [queue for lane, queue in self._waiting.items() if lane not in without]
        due = [(queue.number(key), key) for queue in lanes if (key := queue.first(now, version)) is not None]
        return self.task(min(due)[1]) if due else None

    def num_waiting(self, lane: str) -> int:
        return len(self._waiting[lane])

    def next_deferred(self, version: int) -> PromptTask[K] | None:
        """The prompt that was deferred before all others that may return; `version` is the newest policy."""
        key = self._deferred.first(0.0, version)
        return None if key is None else self.task(key)

    def lease(self, record: LeaseRecord[K]) -> LeaseRecord[K]:
        self.put(record.task, Leased())
        self._add(record)
        return record

    def end_lease(self, lease_id: str) -> LeaseRecord[K] | None:
        record = self._leases.pop(lease_id, None)
        if record is not None:
            self.in_lane[self._lane_of(record.task.key)] -= 1
            _forget(self._by_producer, record.producer, lease_id)
            _forget(self._by_key, record.task.key, lease_id)
        return record

    def lease_on(self, key: K) -> LeaseRecord[K] | None:
        """The lease on a prompt, answered or not, that has not ended."""
        return next(iter(self._by_key.get(key, {}).values()), None)

    def fail(
        self, lease_id: str, reason: str, now: float, give_up: Callable[[PromptTask[K]], None] = lambda task: None
    ) -> bool | None:
        """The lease ended without an answer. Returns True if the prompt waits again, False if its budget is spent and it left
        the table, and None if it makes no difference: the lease had ended before, or somebody else has answered. `give_up`
        is called before the prompt leaves the table, with this failure counted; if it raises, nothing happened."""
        record = self._leases.get(lease_id)
        if record is None or not self.is_open(record.task.key):
            self.end_lease(lease_id)
            return None
        of = failure_class(reason)
        task = self.task(record.task.key).failed(of)
        again = not is_hopeless(reason) and task.failures(of) < self._budgets[of].max_attempts
        if again:
            self.put(task, Waiting(now + self._budgets[of].delay_s(task.failures(of))))
        else:
            give_up(task)
            self.remove(task.key)
        self.end_lease(lease_id)
        return again

    def give_back(self, lease_id: str) -> None:
        """The producer hands the lease back unanswered. The prompt waits again, and no failure is counted."""
        record = self.end_lease(lease_id)
        if record is not None and self.is_open(record.task.key):
            self.put(self.task(record.task.key), Waiting())

    def overdue(self, now: float) -> list[LeaseRecord[K]]:
        """The leases whose deadline has passed and that have not ended, the earliest first."""
        found: dict[str, LeaseRecord[K]] = {}
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, lease_id = heapq.heappop(self._deadlines)
            record = self._leases.get(lease_id)
            if record is not None and record.deadline == deadline:
                found[lease_id] = record
        for record in found.values():  # they stay overdue until they end
            heapq.heappush(self._deadlines, (record.deadline, record.lease_id))
        return list(found.values())

    def leases_of(self, producer: str) -> list[LeaseRecord[K]]:
        return list(self._by_producer.get(producer, {}).values())

    def _add(self, record: LeaseRecord[K]) -> None:
        self.end_lease(record.lease_id)
        self._leases[record.lease_id] = record
        self.in_lane[self._lane_of(record.task.key)] += 1
        self._by_producer[record.producer][record.lease_id] = record
        self._by_key[record.task.key][record.lease_id] = record
        if record.deadline < math.inf:
            heapq.heappush(self._deadlines, (record.deadline, record.lease_id))
        if len(self._deadlines) > 2 * len(self._leases) + _MOST_ENDED:
            records = self._leases.values()
            self._deadlines = [(each.deadline, each.lease_id) for each in records if each.deadline < math.inf]
            heapq.heapify(self._deadlines)


def _forget(index: dict[K, dict[str, LeaseRecord[Any]]], name: K, lease_id: str) -> None:
    del index[name][lease_id]
    if not index[name]:
        del index[name]
