"""Several Ray nodes on this machine, as a process of its own: `python -m tests.cluster.nodes COUNT CPUS`.

Guarantee: it prints the address of Ray and the number of nodes as JSON, obeys `kill` (the newest node, as a power cut would) and
`add` on standard input with a line each, and ends everything with its input.
"""

import json
import os
import sys

os.environ.update(
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_health_check_period_ms="1000",
    RAY_health_check_timeout_ms="1000",
    RAY_health_check_failure_threshold="3",
)

from ray.cluster_utils import Cluster

_MEMORY = 80 * 2**20


def main(count: int, cpus: int) -> None:
    options = {"num_cpus": cpus, "num_gpus": 0, "object_store_memory": _MEMORY}
    cluster = Cluster(initialize_head=True, head_node_args=options | {"include_dashboard": False})
    nodes = [cluster.add_node(**options) for _ in range(count - 1)]
    print(json.dumps({"address": cluster.address}), flush=True)
    try:
        for line in sys.stdin:
            match line.strip():
                case "kill":
                    cluster.remove_node(nodes.pop(), allow_graceful=False)
                case "add":
                    nodes.append(cluster.add_node(**options))
            print(json.dumps({"nodes": 1 + len(nodes)}), flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
