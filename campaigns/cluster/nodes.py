"""Several Ray nodes on this machine, as a process of its own: `python -m campaigns.cluster.nodes COUNT CPUS`.

Guarantee: there is one more node, without CPUs, which has Ray's head. It prints the address of Ray, and then the number of nodes
for each line of standard input: `kill PID` (the node whose raylet has that number, as a power cut would), `add` or `crash`
(all of Ray). It ends everything with its input.
"""

import contextlib
import json
import os
import sys
from typing import Any

os.environ.update(
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_health_check_period_ms="1000",
    RAY_health_check_timeout_ms="1000",
    RAY_health_check_failure_threshold="3",
)

from ray.cluster_utils import Cluster

_START_S, _TRIES = 300, 5
_MEMORY = 80 * 2**20


def main(count: int, cpus: int) -> None:
    options = {"num_gpus": 0, "object_store_memory": _MEMORY}
    head = options | {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [_added(cluster, num_cpus=cpus, **options) for _ in range(count)]
    cluster.wait_for_nodes(_START_S)
    print(json.dumps({"address": cluster.address}), flush=True)
    try:
        for line in sys.stdin:
            match line.split():
                case ["kill", pid]:
                    [dead] = [node for node in nodes if node.all_processes["raylet"][0].process.pid == int(pid)]
                    nodes.remove(dead)
                    cluster.remove_node(dead, allow_graceful=False)
                case ["crash"]:
                    for node in (*nodes, cluster.head_node):
                        node.kill_all_processes(check_alive=False, allow_graceful=False)
                    nodes.clear()
                case ["add"]:
                    nodes.append(_added(cluster, num_cpus=cpus, **options))
            print(json.dumps({"nodes": len(nodes)}), flush=True)
    finally:
        cluster.shutdown()


def _added(cluster: Cluster, **options: Any) -> Any:
    """Tried again where the machine is too busy for Ray's own deadlines."""
    for _ in range(_TRIES):
        with contextlib.suppress(Exception):
            return cluster.add_node(wait=False, **options)
    return cluster.add_node(wait=False, **options)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
