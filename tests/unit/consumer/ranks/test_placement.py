"""Which ranks a trainer has: what `--gpu` and `--ranks` say, and what contradicts them."""

import pytest

from consumer.ranks.placement import Nodes, Placement
from protocol.errors import ConfigError


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the process four of the 64 cores of the machine, as a container does."""
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: set(range(4)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("gpus", "ranks", "world"), [([], None, 1), ([], 3, 3), ([2], None, 1), ([2, 0], None, 2), ([2, 0], 2, 2)]
)
def test_the_number_of_ranks(gpus: list[int], ranks: int | None, world: int) -> None:
    assert Placement.of(gpus, ranks, Nodes()).num_ranks == world


def test_each_rank_sees_its_own_gpu_and_a_share_of_the_cores() -> None:
    placement = Placement.of([2, 0], None, Nodes())
    assert [placement.environment(rank)["CUDA_VISIBLE_DEVICES"] for rank in (0, 1)] == ["2", "0"]
    alone = Placement.of([0], None, Nodes()).environment(0)
    assert alone.keys() == {"CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF"}
    assert Placement.of(list(range(64)), None, Nodes()).environment(63)["OMP_NUM_THREADS"] == "1"
    assert Placement.of([], None, Nodes()).environment(0) == {}
    assert Placement.of([], 3, Nodes()).environment(1) == {"OMP_NUM_THREADS": "1"}
    assert Placement.of([], 16, Nodes()).environment(15) == {"OMP_NUM_THREADS": "1"}


def test_nccl_leaves_the_end_of_a_lost_rank_to_those_who_know_which_it_was() -> None:
    for nodes in (Nodes(), Nodes(2, 1, "10.0.0.5", 5600)):
        environment = Placement.of([0, 1] if nodes.count == 1 else [0], None, nodes).environment(0)
        assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


@pytest.mark.parametrize(("release", "known"), [("2.13.0+cu130", True), ("2.9.1", False), ("3.0.0", True)])
def test_pinned_memory_is_not_rounded_up_where_torch_knows_how(
    monkeypatch: pytest.MonkeyPatch, release: str, *, known: bool
) -> None:
    monkeypatch.setattr("consumer.ranks.placement.version", lambda name: release)
    environment = Placement.of([0], None, Nodes()).environment(0)
    assert ("pinned_max_round_threshold_mb:1" in environment.values()) == known


def test_an_allocator_that_somebody_configured_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert not any("ALLOC_CONF" in name for name in Placement.of([0], None, Nodes()).environment(0))


def test_threads_that_somebody_chose_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert Placement.of([], 3, Nodes()).environment(1) == {}


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_another_launcher_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "0")
    with pytest.raises(ConfigError, match=rf"{name} is set in the environment: start rl-trainer without torchrun"):
        Placement.of([], None, Nodes())


@pytest.mark.parametrize(
    ("gpus", "ranks", "said"), [([0, 1], 3, "--gpu names 2 GPUs"), ([], 0, "--ranks 0"), ([], -1, "--ranks -1")]
)
def test_what_contradicts_itself_is_refused(gpus: list[int], ranks: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Placement.of(gpus, ranks, Nodes())


def test_several_hosts() -> None:
    assert Nodes.of(1, 0, None) == Nodes()
    assert Nodes.of(3, 2, "10.0.0.5:5600") == Nodes(3, 2, "10.0.0.5", 5600)
    assert Nodes.of(2, 0, "[fd00::5]:5600").host == "fd00::5"
    assert not Placement.of([], None, Nodes(2, 0, "h", 1)).is_alone


@pytest.mark.parametrize(
    ("count", "rank", "rendezvous", "said"),
    [
        (2, 2, "h:1", "--node-rank 2: --nodes 2 have the numbers 0 to 1"),
        (1, -1, None, "--node-rank -1"),
        (2, 0, None, "--rendezvous None: several nodes need the same HOST:PORT"),
        (2, 0, "host", "--rendezvous host"),
        (2, 0, "host:http", "--rendezvous host:http"),
        (2, 0, "host:70000", "--rendezvous host:70000"),
    ],
)
def test_hosts_that_contradict_themselves_are_refused(count: int, rank: int, rendezvous: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Nodes.of(count, rank, rendezvous)
