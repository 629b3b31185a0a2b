"""All ranks hear of weights that differ, whatever the difference is."""

import pytest
import torch

from consumer.ranks.exchange import check_agreement
from protocol.errors import RankLostError
from tests.unit.consumer.ranks.thread_ranks import ThreadRanks, on_ranks


def heard(changed: torch.Tensor, original: torch.Tensor) -> list[str]:
    """What each of three ranks hears, of which the last has changed weights."""

    def work(ranks: ThreadRanks) -> str:
        weights = {"first": torch.ones(3), "second": changed if ranks.rank == 2 else original}
        try:
            check_agreement(ranks, 7, weights)
        except RankLostError as error:
            return str(error)
        return ""

    return on_ranks(3, work)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_last_bit_is_found_and_named(dtype: torch.dtype) -> None:
    original = torch.linspace(-1, 1, 1001, dtype=dtype).view(7, 143).T
    assert heard(original.clone(), original) == [""] * 3
    changed = original.clone()
    changed[90, 3] *= 1 + torch.finfo(dtype).eps
    for said in heard(changed, original):
        assert said.startswith("after step 7 rank 2 has other weights than rank 0 (second first)")


def test_a_sign_of_zero_and_a_nan_count() -> None:
    assert all(heard(torch.tensor([-0.0]), torch.tensor([0.0])))
    nan = torch.tensor([float("nan")])
    assert heard(nan, nan.clone()) == [""] * 3
