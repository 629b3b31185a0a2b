"""The memory that a run takes of a GPU, and the cards on which each layout has room, as `--check` shows them.

Guarantee: no GPU is asked and no weight is read. Every number is one of `protocol.gpu.memory`. They are for a trainer of one
rank, or of several that share the weights that train, and an engine of one GPU.
"""

from collections.abc import Iterator
from dataclasses import replace

from pydantic import ValidationError

from protocol.config.learning import ENOUGH_TOKENS
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from protocol.gpu.memory import (
    GIB,
    MOST,
    EngineNeeds,
    TrainerNeeds,
    chosen_utilization,
    engine_needs,
    gib,
    longest_context,
    longest_row,
    room_of,
    row_bytes,
    shares_of,
    trainer_needs,
)
from protocol.gpu.model_files import ModelShape, model_shape
from protocol.wire.model_source import folder_on_disk

CARDS = (16, 24, 40, 48, 80, 96, 141)
"""GiB of common GPUs."""
_STAGED = 2 * 10
"""Bytes for an element that differs, in the former patch and in the next: its place, of 8, and its bits, as
`producer.engine.patch_worker` has them on a GPU."""
LAYOUTS = ("own, trainer", "own, engine", "shared", "turns")
"""The values of `pipeline.gpu`. With `own` each daemon has a card, so they are two rows."""


def memory_table(config: RunConfig, choice: str, num_ranks: int = 1) -> Iterator[str]:
    """Yield lines for the user.

    Args:
        choice: the value of `--gpu`.
        num_ranks: of the trainer.
    """
    if choice == "cpu":
        return
    folder = folder_on_disk(config.model.path, config.model.revision)
    try:
        model = model_shape(folder)
    except ConfigError:
        yield f"memory of GPUs: unknown, because {folder} has no config.json with *.safetensors on this machine"
        return
    yield "memory of GPUs, estimated:"
    yield from _needs_in_words(config, model, num_ranks)
    yield f"  {'GPU with GiB':<14}" + "".join(f"{card:>6}" for card in CARDS)
    for layout, cells in fits(config, model, num_ranks).items():
        yield f"  {layout:<14}" + "".join(f"{cell:>6}" for cell in cells)
    yield f"  yes: has room for passes of {_unhurried(config, model, num_ranks)[0].tokens} tokens and for these rows at once"
    yield "  part: has room for less, or recomputes layers; no: does not start"


def fits(config: RunConfig, model: ModelShape, num_ranks: int = 1) -> dict[str, list[str]]:
    """Tell for each of `LAYOUTS` and each of `CARDS` whether it has room: yes, part or no."""
    unhurried = _unhurried(config, model, num_ranks)
    least = trainer_needs(config, model, num_ranks), engine_needs(config, model)

    def cell(layout: str, card: int) -> str:
        if _has_room(config, layout, card * GIB, *unhurried):
            return "yes"
        return "part" if _has_room(config, layout, card * GIB, *least) else "no"

    return {
        layout: [cell(layout, card) if _is_accepted(config, layout.partition(",")[0]) else "no" for card in CARDS]
        for layout in LAYOUTS
        if num_ranks == 1 or layout.startswith("own")
    }


def sharing_of(config: RunConfig, total: int) -> tuple[str, str]:
    """Choose how trainer and producer use one GPU where the configuration does not say it: with `shared` if both fit beside each
    other, else in `turns`. Return the value of `pipeline.gpu`, and the reason.

    Args:
        total: bytes of the GPU.

    Raises:
        ConfigError: they fit in neither way.
    """
    try:
        model = model_shape(folder_on_disk(config.model.path, config.model.revision))
    except ConfigError:
        return "shared", "the files of model.path do not say what fits"
    trainer, engine = trainer_needs(config, model), engine_needs(config, model)
    of_shared = f"the trainer's {gib(trainer.least)} and the engine's {gib(engine.least)} at least"
    refused = []
    for sharing, needs in (("shared", of_shared), ("turns", f"the larger one of {of_shared}")):
        pipeline = config.pipeline.model_copy(update={"gpu": sharing})
        if not _is_accepted(config, sharing):
            refused.append(f"{sharing} does not go together with other keys")
        elif _has_room(config.model_copy(update={"pipeline": pipeline}), sharing, total, trainer, engine):
            return sharing, "; ".join([*refused, f"{sharing} has room for {needs}"])
        else:
            refused.append(f"{sharing} has no room for {needs}")
    raise ConfigError(
        f"pipeline.gpu: trainer and producer do not fit on a GPU of {gib(total)}, of which CUDA leaves "
        f"{gib(max(0, room_of(total, 2)))}: {'; '.join(refused)}. Take model.quantization: nf4, engine.quantization, a shorter "
        "engine.max_model_len or sampling.max_completion_length, or a GPU each"
    )


def _is_accepted(config: RunConfig, sharing: str) -> bool:
    """Return whether the other keys go together with this value of `pipeline.gpu`."""
    pipeline = config.pipeline.model_dump() | {"gpu": sharing}
    try:
        RunConfig.model_validate(config.model_dump() | {"pipeline": pipeline})
    except ValidationError:
        return False
    return True


def _has_room(config: RunConfig, layout: str, total: int, trainer: TrainerNeeds, engine: EngineNeeds) -> bool:
    alone, beside = room_of(total, 1), room_of(total, 2)
    of_engine = int((chosen_utilization(config) or MOST) * total)
    match layout:
        case "own, trainer":
            return trainer.least <= alone
        case "own, engine":
            return engine.least <= min(alone, of_engine)
        case "turns":
            return trainer.least <= beside and engine.least <= min(beside, of_engine)
    if config.pipeline.gpu != "shared":  # then the engine's share is for a GPU of its own
        config = config.model_copy(update={"engine": config.engine | {"gpu_memory_utilization": None}})
    try:
        return engine.least <= shares_of(config, total, trainer, engine).producer
    except ConfigError:
        return False


def _unhurried(config: RunConfig, model: ModelShape, num_ranks: int) -> tuple[TrainerNeeds, EngineNeeds]:
    """Compute the needs without recomputation, unless it is configured, and with a KV cache for `_rows`."""
    pipeline, trainer = config.pipeline, {"gradient_checkpointing": False} | config.trainer
    if pipeline.trainer_tokens_per_micro_batch == "auto":
        pipeline = pipeline.model_copy(update={"trainer_tokens_per_micro_batch": ENOUGH_TOKENS})
    wished = config.model_copy(update={"pipeline": pipeline, "trainer": trainer})
    engine = engine_needs(config, model)
    cache = max(engine.cache, _rows(config) * row_bytes(config, model, longest_row(config, model)))
    return trainer_needs(wished, model, num_ranks), replace(engine, cache=cache)


def _rows(config: RunConfig) -> int:
    """Return the completions of a step, or fewer if the engine samples fewer at once."""
    limit = config.engine.get("max_num_seqs")
    return min(config.completions_per_step, limit) if isinstance(limit, int) else config.completions_per_step


def _needs_in_words(config: RunConfig, model: ModelShape, num_ranks: int) -> Iterator[str]:
    def of_passes(*, recomputes: bool) -> TrainerNeeds:
        trainer = config.trainer | {"gradient_checkpointing": recomputes}
        return trainer_needs(config.model_copy(update={"trainer": trainer}), model, num_ranks)

    who = "trainer" if num_ranks == 1 else "each rank of the trainer"
    kept, recomputed = of_passes(recomputes=False), of_passes(recomputes=True)
    yield (
        f"  {who}: base {gib(kept.base)}, what trains, with its optimizer, {gib(kept.trained)}; a pass of {kept.tokens} tokens "
        f"{gib(kept.passes)}, or {gib(recomputed.passes)} if all layers recompute"
    )
    engine, row = engine_needs(config, model), longest_row(config, model)
    context = longest_context(config, model) or row
    of_context, of_rows = row_bytes(config, model, context), _rows(config) * row_bytes(config, model, row)
    yield (
        f"  engine: weights {gib(engine.weights)}, LoRA slots {gib(engine.adapters)}, kernels; KV cache of "
        f"{context} tokens {gib(of_context)}, of {_rows(config)} rows of {row} tokens {gib(of_rows)}"
    )
    if config.weights == "full":
        a_percent = sum(weight.num_elements for weight in model.weights) // 100
        yield (
            f"  a swap takes {gib(_STAGED * a_percent)} beside the engine's share of its GPU for each percent of the weights "
            "that differs from the checkpoint, which the rows below do not count"
        )
