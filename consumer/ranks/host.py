"""`rl-trainer` on a host that has ranks and not the trainer (`--node-rank` above 0).

Guarantee: its ranks end with it and with rank 0's host. It ends as the trainer ends, or, with `ExitCode.RANK_LOST`, when a rank
of its own or rank 0's host is lost. It touches no run_dir, and gives signs of life from the moment it has found rank 0's host.
"""

import contextlib
import logging
import signal
import time
from collections import deque
from collections.abc import Iterator

import torch.distributed as dist

from consumer.ranks.placement import Placement
from consumer.ranks.presence import Heartbeats, tell_lost
from consumer.ranks.rendezvous import GONE, OVER, choose_interface, facts_of, join, reach
from consumer.ranks.team import RankProcesses, rank_processes
from protocol.config.run import RunConfig
from protocol.errors import ExitCode, RankLostError
from protocol.runtime.signals import on_signals

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.25
_MOST_TOLD = 8  # signals between two looks


def run_host(config: RunConfig, placement: Placement) -> ExitCode:
    """
    Raises:
        SlipstreamError: this host is not as rank 0's, or one of the two is lost.
    """
    nodes = placement.nodes
    choose_interface(nodes.host)
    with _node_0(placement):
        facts = facts_of(config)
        store = reach(nodes)
        signs = Heartbeats(store, f"node {nodes.rank}")
        joined = join(store, nodes, placement.num_ranks, facts, signs)
    ranks = range(joined.first_rank, joined.first_rank + placement.num_ranks)
    logger.info(
        "ranks %d to %d of %d begin here, for node 0 at %s:%d",
        ranks[0],
        ranks[-1],
        joined.world,
        nodes.host,
        nodes.port,
    )
    told: deque[signal.Signals] = deque(maxlen=_MOST_TOLD)
    on_signals(told.append)
    with (
        rank_processes(config, placement, ranks, joined.world, nodes.port, first_index=0) as processes,
        _node_0(placement),
    ):
        return _watch(store, nodes.rank, processes, signs, told)


@contextlib.contextmanager
def _node_0(placement: Placement) -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise RankLostError(f"node 0 at {placement.nodes.host}:{placement.nodes.port} is gone ({error})") from error


def _watch(
    store: dist.Store, node: int, processes: RankProcesses, signs: Heartbeats, told: deque[signal.Signals]
) -> ExitCode:
    lost = set[int]()
    while not store.check([OVER]):
        signs.send()
        while told:
            logger.warning("got %s: this ends with the trainer on node 0; stop that", told.popleft().name)
        for rank, how in processes.ended():
            if rank not in lost:
                lost.add(rank)
                logger.error("rank %d ended (%s)", rank, how)
                tell_lost(store, rank, how)
        time.sleep(_LOOK_EVERY_S)
    code = ExitCode(int(store.get(OVER)))
    store.set(f"{GONE}/{node}", "")
    if code != ExitCode.OK:
        raise RankLostError("the trainer on node 0 has ended early; its own messages say why")
    return code
