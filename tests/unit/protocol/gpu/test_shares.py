"""How two daemons divide a GPU, in round numbers: of 100 GiB 97 count, and two contexts take 1.5 of them."""

from pathlib import Path

import pytest

from protocol.errors import ConfigError
from protocol.gpu.memory import GIB, EngineNeeds, Shares, TrainerNeeds, shares_of
from tests.unit.protocol.gpu.models import run_of

TOTAL = 100 * GIB


def divided(*, wanted: float = 20, least: float = 10, engine: float = 30, chosen: object = None) -> Shares:
    needs = TrainerNeeds(4 * GIB, GIB, 16384, int((wanted - 5) * GIB), 1024, int((least - 5) * GIB))
    weights = int((engine - 1.5) * GIB)
    config = run_of(Path("/models/one"), engine={} if chosen is None else {"gpu_memory_utilization": chosen})
    return shares_of(config, TOTAL, needs, EngineNeeds(weights, 0, 0))


@pytest.mark.parametrize(
    ("wishes", "trainer", "utilization"),
    [
        ({}, 20, 0.755),  # what it wants, and the rest for the engine
        ({"engine": 80}, 15.5, 0.8),  # less than it wants, so that the engine runs
        ({"engine": 80, "least": 15.5}, 15.5, 0.8),
        ({"wanted": 5, "least": 5, "engine": 2}, 5.5, 0.9),  # no engine takes more
        ({"chosen": 0.5}, 45.5, 0.5),
        ({"chosen": "0.5"}, 45.5, 0.5),
        ({"chosen": 0.85, "engine": 99}, 10.5, 0.85),  # whether the engine can do with it is for vLLM to say
    ],
)
def test_shares(wishes: dict[str, float], trainer: float, utilization: float) -> None:
    found = divided(**wishes)
    assert (found.trainer / GIB, found.utilization) == pytest.approx((trainer, utilization))
    assert found.trainer + found.producer <= 95.5 * GIB


def test_in_words() -> None:
    assert divided().in_words() == (
        "of 100.0 GiB the trainer may take 20.0 GiB (base 4.0 GiB, what trains, with its optimizer, 1.0 GiB; a pass of 16384 "
        "tokens takes 15.0 GiB) and the producer 75.5 GiB (0.755, engine.gpu_memory_utilization, computed)"
    )
    assert "a pass of 16384 tokens takes 15.0 GiB and will be cut smaller)" in divided(engine=80).in_words()
    assert divided(chosen=0.5).in_words().endswith("50.0 GiB (0.5, as engine.gpu_memory_utilization says)")


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        (
            {"engine": 80, "least": 17},
            "GPU has 100.0 GiB.* 95.5 GiB, .* both need 97.0 GiB .*quantization: nf4.*pipeline.gpu: turns",
        ),
        ({"chosen": 0.9}, "0.9 of 100.0 GiB leaves 5.5 GiB .* needs 10.0 GiB .* lower it to at most 0.85"),
        ({"chosen": 0.9, "least": 97}, "needs 97.0 GiB .* take .*quantization: nf4"),
        ({"chosen": 1.5}, "expected a share above 0 and at most 1, got 1.5"),
        ({"chosen": "much"}, "expected a share above 0 and at most 1, got 'much'"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_fix(wishes: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        divided(**wishes)
