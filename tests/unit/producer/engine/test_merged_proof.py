"""`producer.engine.merged_proof`, in numbers worked by hand, and weights that a `Merger` leaves as they should not be."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from producer.engine import merged_worker
from producer.engine.merged_proof import Evidence, evidence_of, prove, row_sums
from producer.engine.merged_worker import Merger
from producer.engine.packed_layers import columns_of
from producer.engine.published import Part, PartlyServedError
from tests.unit.producer.engine.test_merging import adapter, engine_model, prepare

NAMES = ("attn.k_proj", "attn.o_proj", "mlp.up_proj")


def part_of(up: torch.Tensor, down: torch.Tensor) -> Part:
    return Part("o", "o_proj", None, down, up, 1.0)


def proof(base: torch.Tensor, update: list[float], held: torch.Tensor | None = None) -> dict[str, tuple[float, float]]:
    """Prove one column that became base + update, rounded, or `held` where that is given."""
    up = torch.tensor(update)[:, None]
    merged = (base.float() + up).to(base.dtype)
    evidence = evidence_of("o_proj", Whole(), base, [part_of(up, torch.ones(1, 1))], row_sums(merged), 1)
    return prove([evidence], {"o_proj": merged if held is None else held}, {})


def column(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.bfloat16)[:, None]


def test_the_share_is_the_projection_of_what_is_left_on_the_update() -> None:
    """Above 1 bfloat16 has steps of 1/128: an update of 1/512 vanishes, 3/512 becomes 4/512, and near 0 nothing is lost."""
    left, whole = proof(column(1, 1, 0), [1 / 512, 3 / 512, 1 / 512])["o"]
    assert (left * 512**2, whole * 512**2) == (4 * 3 + 1 * 1, 1 + 9 + 1)
    assert proof(column(1, 1), [1 / 512, -1 / 1024])["o"][0] == 0, "nothing is left"
    left, whole = proof(torch.tensor([[1.0], [2.0]]), [1e-3, -2e-3])["o"]
    assert left == pytest.approx(whole, rel=1e-4), "float32 loses nothing"


@pytest.mark.parametrize(
    ("held", "is_refused"),
    [
        (column(1, 1 + 1 / 128), False),
        (column(1 + 1 / 128, 1), True),  # rows exchanged
        (column(1, 1), True),  # of the base
        (column(1, 1 + 2 / 128), True),
        (column(1, float("nan")), True),
    ],
)
def test_weights_with_another_number_are_refused(held: torch.Tensor, is_refused: bool) -> None:
    if not is_refused:
        assert proof(column(1, 1), [0, 1 / 128], held)
        return
    with pytest.raises(PartlyServedError, match="the weights of o_proj are not the base with the update"):
        proof(column(1, 1), [0, 1 / 128], held)


def test_the_sum_of_what_is_computed_is_no_proof_of_it() -> None:
    """If half of the update is merged, sums agree; then columns tell."""
    base, wrong = column(1, 1), column(1, 1 + 1 / 128)
    part = part_of(torch.tensor([[0.0], [2 / 128]]), torch.ones(1, 1))
    evidence = evidence_of("o_proj", Whole(), base, [part], row_sums(wrong), 1)
    with pytest.raises(PartlyServedError):
        prove([evidence], {"o_proj": wrong}, {})


def test_a_packed_layer_shows_columns_and_each_swap_asks_for_others() -> None:
    weight = torch.randn(3, 24)
    layer: Any = SimpleNamespace(weight=torch.empty(0))
    layer.quant_method = SimpleNamespace(apply=lambda layer, rows, bias: rows @ weight.t())
    found: set[int] = set()
    for number in range(3):
        evidence: Evidence = evidence_of("o", layer, weight, [], row_sums(weight), number, weight)
        assert len(evidence.columns) == 8
        found |= set(evidence.columns.tolist())
        shown = columns_of(layer, evidence.columns, 24)
        assert torch.equal(shown, weight[:, evidence.columns])
        prove([evidence], {}, {"o": shown})
        with pytest.raises(PartlyServedError):
            prove([evidence], {}, {"o": shown.nextafter(torch.tensor(9.0))})
    assert found == set(range(24))


@pytest.mark.parametrize(("dtype", "columns"), [(torch.bfloat16, 4), (torch.bfloat16, 3), (torch.float32, 3)])
def test_sums_of_rows_tell_rows_and_last_bits_apart(dtype: torch.dtype, columns: int) -> None:
    weight = torch.randn(4, columns).to(dtype)
    sums = row_sums(weight)
    assert sums.shape == (4,)
    assert not torch.equal(row_sums(weight.flip(0)), sums)
    bits = weight.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
    bits[2, 1] += 1
    assert (row_sums(weight) != sums).tolist() == [False, False, True, False]


def merged(folder: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[Merger, torch.nn.Module]:
    model = engine_model(dtype)
    made = Merger(model)
    prepare(made, adapter(folder, *NAMES))
    assert made.state == ("done", str(folder))
    made.flip()
    return made, model


def state_of(merging: Merger) -> tuple[str, str]:
    merging.prove()
    assert merging.thread is not None
    merging.thread.join()
    return merging.state


def test_merged_weights_are_proved_with_what_is_left_of_each_module(tmp_path: Path) -> None:
    """Module i has the update 2 i [[1, 2], [3, 6]]; all sums with ones are small integers, which bfloat16 holds."""
    merging, _ = merged(tmp_path / "a")
    assert state_of(merging) == ("done", str(tmp_path / "a"))
    square = 4 * (1 + 4 + 9 + 36)
    assert merging.survival == {
        "k_proj": (square, square), "o_proj": (4 * square, 4 * square), "up_proj": (9 * square, 9 * square)
    }  # fmt: skip
    prepare(merging, None)
    merging.flip()
    assert state_of(merging) == ("done", "")
    assert merging.survival == {}


def skip_a_layer(merging: Merger, model: Any) -> None:
    model.mlp.gate_up_proj.weight.data.fill_(1)


def halve(merging: Merger, model: Any) -> None:
    model.attn.o_proj.weight.data.sub_(1).div_(2).add_(1)


def exchange_parts(merging: Merger, model: Any) -> None:
    weight = model.attn.qkv_proj.weight.data
    weight.copy_(weight.roll(2, 0))


@pytest.mark.parametrize(
    ("fault", "named"),
    [(skip_a_layer, "mlp.gate_up_proj"), (halve, "attn.o_proj"), (exchange_parts, "attn.qkv_proj")],
)
def test_a_layer_that_is_not_as_it_should_be_is_refused_by_its_name(tmp_path: Path, fault: Any, named: str) -> None:
    merging, model = merged(tmp_path / "a")
    fault(merging, model)
    state, said = state_of(merging)
    assert (state, f"the weights of {named} are not" in said) == ("refused", True)


@pytest.mark.parametrize("fault", ["alpha is halved", "a kind of module is missing"])
def test_a_merge_that_is_wrong_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    merge, factors = merged_worker.merge, merged_worker.factors
    if fault == "alpha is halved":
        monkeypatch.setattr(merged_worker, "merge", lambda base, up, down, *rest: merge(base, up / 2, down, *rest))
    else:
        monkeypatch.setattr(
            merged_worker,
            "factors",
            lambda layer, shape, parts: factors(layer, shape, [p for p in parts if p.name != "k_proj"]),
        )
    merging, _ = merged(tmp_path / "a")
    state, said = state_of(merging)
    assert (state, "attn.qkv_proj" in said) == ("refused", True)


class Whole:
    """A layer that takes all of a matrix."""

    def weight_loader(self, param: Any, loaded: torch.Tensor) -> None:
        param.data.copy_(loaded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_weights_that_are_right_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """A hundred of any magnitude and number of ranks."""
    torch.manual_seed(0)
    for number in range(100):
        rank = 1 + number % 9
        base = (torch.randn(24, 40) * 10 ** -(number % 5)).to(dtype)
        up, down = torch.randn(24, rank) * 10 ** -(number % 7 - 2.0), torch.randn(rank, 40)
        out = torch.empty_like(base)
        sums = merged_worker.merge(base, up, down, out, torch.device("cpu"))
        prove([evidence_of("o", Whole(), base, [part_of(up, down)], sums, number)], {"o": out}, {})
