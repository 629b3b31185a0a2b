"""The proof of merged weights, and the share of an update that their dtype leaves of it.

Guarantee: weights that pass have the sums of the computed weights, row by row and in 64 bits. In `COLUMNS` columns, others
at each swap, each number is the nearest of its dtype to base + update. A layer that is packed (vLLM's CPU build) shows its
columns, and no sums. All is computed on the device of the weights, for which the host waits once.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from producer.engine.exchange_worker import Survival
from producer.engine.published import Part, PartlyServedError, listed, loaded

COLUMNS = 8
_HALF_STEP = 2.0**-24  # of float32, relative


class Evidence(NamedTuple):
    """The weight (outputs, inputs) that a layer of this worker should have. C of its columns are compared.

    Attributes:
        sums: of the rows of the merged weight, int64 (outputs,).
        columns: their numbers, int64 (C,).
        merged: these columns of the merged weight (outputs, C); None where the layer shows its sums.
        base: these columns of the base (outputs, C).
        update: these columns of D, float32 (outputs, C).
        doubt: how far two computations of base + update in float32 may be apart, (outputs, C).
        modules: last part of a module's name, and the outputs that are its own.
    """

    layer: str
    sums: torch.Tensor
    columns: torch.Tensor
    merged: torch.Tensor | None
    base: torch.Tensor
    update: torch.Tensor
    doubt: torch.Tensor
    modules: list[tuple[str, slice]]


def evidence_of(
    name: str, layer: Any, base: torch.Tensor, parts: list[Part], sums: torch.Tensor, number: int,
    merged: torch.Tensor | None = None,
) -> Evidence:  # fmt: skip
    """Note the evidence for a layer, on the device of `sums`; swap `number` chooses the columns. The update is computed part by
    part, and not from the factors of the merge."""
    num_outputs, num_inputs = base.shape
    count = min(COLUMNS, num_inputs)
    columns = (number + torch.arange(count) * num_inputs // count) % num_inputs
    update, doubt = torch.zeros(num_outputs, count), base[:, columns].float().abs()
    modules = []
    for part in parts:
        down, up = part.down.float(), part.up.float()
        down = down if down.shape[1] == num_inputs else loaded(layer, (len(down), num_inputs), down, (), input_dim=1)
        down = part.scaling * down[:, columns]
        whole = torch.cat([up @ down, up.norm(dim=1, keepdim=True), torch.ones(len(up), 1)], 1)
        shard = () if part.shard is None else (part.shard,)
        own = loaded(layer, (num_outputs, count + 2), whole, shard, output_dim=0)
        update += own[:, :count]
        # Cauchy-Schwarz: at least the magnitude of every sum of products.
        doubt += (len(down) + 4) * own[:, count : count + 1] * down.norm(dim=0)
        rows = own[:, -1].nonzero()
        modules.append((part.name, slice(int(rows[0]), int(rows[-1]) + 1)))
    device = sums.device
    return Evidence(
        name, sums, columns.to(device), None if merged is None else merged[:, columns], base[:, columns].to(device),
        update.to(device), 4 * _HALF_STEP * doubt.to(device), modules,
    )  # fmt: skip


def row_sums(weight: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits of each row, as int64 (rows,) that wraps around."""
    width = weight.shape[1] * weight.element_size()
    whole = width % 8 == 0 and weight.is_contiguous() and weight.data_ptr() % 8 == 0
    words = torch.int64 if whole else {2: torch.int16, 4: torch.int32}[weight.element_size()]
    return weight.view(words).sum(1, dtype=torch.int64)


def prove(
    all_evidence: Iterable[Evidence], weights: dict[str, torch.Tensor], shown: dict[str, torch.Tensor]
) -> Survival:
    """Compare the weights that layers have, or the columns that packed ones have shown, with the evidence. Return the share of
    the update that is left. Raises PartlyServedError if they differ."""
    names, flags = [], []
    survived: dict[str, list[torch.Tensor]] = defaultdict(list)
    for each in all_evidence:
        held = shown.get(each.layer)
        if held is None:
            held = weights[each.layer][:, each.columns]
            is_other = (row_sums(weights[each.layer]) != each.sums).any()
        else:
            is_other = (held != each.merged).any()
        total = each.base.float() + each.update
        kind = torch.finfo(held.dtype)
        bound = each.doubt + kind.eps / 2 * total.abs() + kind.tiny * kind.eps
        is_wrong = ~((held.float() - total).abs() <= bound)  # a NaN, too
        names.append(each.layer)
        flags.append(is_other | is_wrong.any())
        left, whole = (held.float() - each.base.float()) * each.update, each.update.square()
        for module, rows in each.modules:
            survived[module].append(torch.stack([left[rows].sum(), whole[rows].sum()]).double())
    if not names:
        return {}
    numbers = torch.cat(
        [torch.stack(flags).double(), *(torch.stack(sums).sum(0) for sums in survived.values())]
    ).tolist()
    if wrong := [name for name, differs in zip(names, numbers, strict=False) if differs]:
        raise PartlyServedError(
            f"the weights of {listed(wrong)} are not the base with the update of the published adapter; the "
            "engine would not sample from this policy"
        )
    sums_of = iter(numbers[len(names) :])
    return {module: (next(sums_of), next(sums_of)) for module in survived}
