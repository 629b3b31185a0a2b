"""The limit of completions in the engine, which moves as `producer.rollouts.admission` says."""

from producer.engine_contract import EngineLoad

DECREASE = 0.75
ROOM = 0.9  # of the KV cache in use: below it the limit may rise
TOLERATED = 1.0  # preemptions per completion: about where throughput was best


class AdmissionControl:
    """The limit alone, as a function of the loads that it gets. `preemptions` are those before the first group. `ceiling` groups
    of `group_size` completions are the most."""

    def __init__(self, ceiling: int, group_size: int, preemptions: int = 0) -> None:
        self._ceiling = self._limit = float(ceiling * group_size)
        self._group_size = group_size
        self._tolerated = TOLERATED * group_size  # per group
        self._preemptions = preemptions  # as last told
        self._excess = 0.0  # of them, over what the groups that have left may cost
        self._unsettled = 0  # groups of the last decrease that are still in the engine
        self._disturbed = 0  # groups of the last preemption that are still in the engine

    @property
    def limit(self) -> int:
        return int(self._limit)

    @property
    def is_calm(self) -> bool:
        """Tell whether every group that was in the engine at the last preemption has left."""
        return self._disturbed == 0

    def look(self, inside: int, num_completions: int, load: EngineLoad) -> bool:
        """Lower the limit if the engine has too much with `inside` groups, of which `num_completions` have not ended. Returns
        whether it has."""
        if load.preemptions > self._preemptions:
            self._disturbed = inside
        self._excess += load.preemptions - self._preemptions
        self._preemptions = load.preemptions
        if self._excess <= self._tolerated * inside:
            return False
        self._excess = 0.0
        if self._unsettled == 0:
            self._limit = max(float(self._group_size), DECREASE * min(self._limit, num_completions))
            self._unsettled = inside
        return True

    def note_left(self, inside: int, num_completions: int, load: EngineLoad) -> None:
        """Note that one of the `inside` groups is about to leave."""
        overloaded = self.look(inside, num_completions, load)
        self._excess = max(0.0, self._excess - self._tolerated)
        self._unsettled = max(0, self._unsettled - 1)
        self._disturbed = max(0, self._disturbed - 1)
        if not overloaded and load.kv_cache_usage < ROOM and num_completions + self._group_size > self.limit:
            self._limit = min(self._ceiling, self._limit + self._group_size / inside)
