"""Which ranks a trainer has: what `--gpu` and `--ranks` say, and what contradicts them."""

import pytest

from consumer.ranks.placement import Placement
from protocol.errors import ConfigError


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("gpus", "ranks", "world"), [([], None, 1), ([], 3, 3), ([2], None, 1), ([2, 0], None, 2), ([2, 0], 2, 2)]
)
def test_the_number_of_ranks(gpus: list[int], ranks: int | None, world: int) -> None:
    assert Placement.of(gpus, ranks).world == world


def test_each_rank_sees_its_own_gpu_and_a_share_of_the_cores() -> None:
    placement = Placement.of([2, 0], None)
    assert [placement.environment(rank)["CUDA_VISIBLE_DEVICES"] for rank in (0, 1)] == ["2", "0"]
    assert Placement.of([], None).environment(0) == {}
    assert Placement.of([], 3).environment(1) == {"OMP_NUM_THREADS": "1"}
    assert Placement.of([], 16).environment(15) == {"OMP_NUM_THREADS": "1"}


def test_threads_that_somebody_chose_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert Placement.of([], 3).environment(1) == {}


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_another_launcher_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "0")
    with pytest.raises(ConfigError, match=rf"{name} is set in the environment: start rl-trainer without torchrun"):
        Placement.of([], None)


@pytest.mark.parametrize(
    ("gpus", "ranks", "said"), [([0, 1], 3, "--gpu names 2 GPUs"), ([], 0, "--ranks 0"), ([], -1, "--ranks -1")]
)
def test_what_contradicts_itself_is_refused(gpus: list[int], ranks: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Placement.of(gpus, ranks)
