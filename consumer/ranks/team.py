"""The other ranks, as rank 0 sees them: started, connected, ended.

Guarantee: they end with this process, however it ends. One that cannot start ends the start with its own message.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch

from consumer.ranks.exchange import ALONE, ProcessRanks, Ranks
from consumer.ranks.placement import Placement
from consumer.ranks.presence import RankWatch
from consumer.ranks.processes import rank_processes
from consumer.ranks.rendezvous import (
    FOREVER_S,
    OVER,
    choose_interface,
    connect,
    facts_of,
    gather_hosts,
    listen,
    until_heard,
)
from consumer.ranks.signs import silence_s
from protocol.config.run import RunConfig
from protocol.errors import ExitCode, RankLostError


@contextlib.contextmanager
def team(
    config: RunConfig, placement: Placement, on_lost: Callable[[RankLostError], None], stop: Callable[[], bool]
) -> Iterator[Ranks]:
    """Starts the other ranks and waits for them.

    Args:
        on_lost: is called on another thread when one of them is lost.
        stop: whether to wait no longer for other hosts.

    Raises:
        StopRequested: instead of waiting.
        RankLostError: instead of an error within the context that came from a lost rank.
        SlipstreamError: another host is not as this one, or the address for them cannot be bound.
    """
    if placement.is_alone:
        yield ALONE
        return
    nodes = placement.nodes
    store = listen(nodes)
    choose_interface(nodes.host)
    facts = facts_of(config) if nodes.count > 1 else {}
    hosts = gather_hosts(store, nodes, placement.num_ranks, facts, stop)
    world, own = hosts[-1].stop, hosts[0][1:]
    with rank_processes(config, placement, own, world, store.port, first_index=1) as processes:
        watch = RankWatch(
            connect(nodes.host, store.port),
            hosts,
            silence_s(config.pipeline.rank_silence_s, nodes.count),
            processes.ended,
            [lambda _: processes.kill(), on_lost],
        )
        watch.start()
        over = ExitCode.RANK_LOST
        try:
            yield ProcessRanks(store, 0, world, torch.device("cuda" if placement.gpus else "cpu"), FOREVER_S)
            over = ExitCode.OK
        except Exception as error:
            watch.explain(error)
            raise
        finally:
            watch.close()
            store.set(OVER, str(int(over)))
            until_heard(store, range(1, nodes.count), within_s=5.0 if watch.lost is None else 1.0)
