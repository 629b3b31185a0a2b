"""What Prometheus is told of a run's daemons."""

import pytest

from protocol.exposition import Target, Targets, reachable
from protocol.runtime import logs


def test_every_part_adds_what_it_knows_of_at_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_context", {"run": "5f0c"})
    targets, fleet = Targets("/runs/sums"), list[Target]()
    targets.add(lambda: [Target("trainer:9464", "rl-trainer", "t", "trainer")])
    targets.add(lambda: fleet)
    assert [one["targets"] for one in targets.read()] == [["trainer:9464"]]
    fleet.append(Target("gpu7:9465", "rl-producer", "p-1-ab", "gpu7"))
    labels = {"job": "rl-producer", "daemon": "p-1-ab", "host": "gpu7", "run": "5f0c", "run_dir": "/runs/sums"}
    assert targets.read()[1] == {"targets": ["gpu7:9465"], "labels": labels}


@pytest.mark.parametrize(
    ("address", "endpoint", "told"),
    [
        ("127.0.0.1:9465", "ipc:///run/control.ipc", "127.0.0.1:9465"),
        ("127.0.0.1:9465", "tcp://127.0.0.1:5557", "127.0.0.1:9465"),
        ("127.0.0.1:9465", "tcp://localhost:5557", "127.0.0.1:9465"),
        ("127.0.0.1:9465", "tcp://10.0.0.5:5557", ""),
        ("localhost:9465", "tcp://trainer:5557", ""),
        ("[::1]:9465", "tcp://[fd00::5]:5557", ""),
        ("gpu7:9465", "tcp://10.0.0.5:5557", "gpu7:9465"),
        ("10.0.0.7:9465", "tcp://10.0.0.5:5557", "10.0.0.7:9465"),
        ("gpu7:9465", "ipc:///run/control.ipc", "gpu7:9465"),
    ],
)
def test_an_address_that_only_its_own_host_reaches_is_not_handed_on(address: str, endpoint: str, told: str) -> None:
    assert reachable(address, endpoint) == told
