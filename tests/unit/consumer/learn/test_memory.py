"""A device that refuses memory: the step is cut again, by all ranks, and can be taken again bit for bit."""

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from consumer.app.run import Run
from consumer.app.setup import RunStart
from consumer.learn import micro_batches as step_cuts
from consumer.learn import recomputation
from consumer.learn.memory import OutOfMemory, PassMemory, allocatable_bytes, oom_on_all_ranks, tokens_within
from consumer.learn.micro_batches import StepSplitter
from consumer.learn.trainer import SlipstreamTrainer
from protocol.errors import DeviceError, ExitCode
from replay.batch_selection import TrainingBatch
from replay.journal.schema import MicroBatchPlan
from tests.unit.consumer.builders import rollout_group, run_config
from tests.unit.consumer.ranks.thread_ranks import ThreadRanks, on_ranks
from tests.unit.consumer.trl_reference import lora_parameters, metrics_of, slipstream_trainer

OPTIONS = {"num_iterations": 2, "beta": 0.1, "max_steps": 4, "save_strategy": "no", "max_grad_norm": 1.0}


def batches() -> list[TrainingBatch]:
    groups = [
        rollout_group([[3, 4, 5, 6], [7, 8], [9], [5, 5, 5]], prompt=[3] * 4, rewards=[0.0, 1.0, 2.0, 4.0]),
        rollout_group([[6, 4, 5, 6], [7, 9], [8], [5, 6, 5]], prompt=[4] * 3, rewards=[3.0, 1.0, 2.0, 0.0]),
    ]
    return [TrainingBatch(1, 2, 2, groups, 2), TrainingBatch(3, 2, 4, groups[::-1], 2)]


def trainer_of(folder: Path, model: Path, cuts: dict[int, MicroBatchPlan], **options: Any) -> SlipstreamTrainer:
    """With dropout, so that random numbers matter.

    Args:
        cuts: that were recorded before.
    """
    config = run_config(folder, model, lora={"lora_dropout": 0.3}, trainer=OPTIONS | options)
    trainer = slipstream_trainer(config, model)
    trainer._splitter = StepSplitter("auto", trainer._ranks, cuts.get)
    trainer._batches = batches()
    return trainer


@pytest.mark.long
def test_what_a_batch_leaves_on_the_device_goes_with_it(tmp_path: Path, tiny_model: Path) -> None:
    trainer = trainer_of(tmp_path, tiny_model, {}, max_steps=2)
    trainer.train()
    held, metrics = trainer._splitter.micro_batches, metrics_of(trainer)  # transformers holds them, too
    kept = [weakref.ref(batch[name]) for batch in held for name in ("old_per_token_logps", "ref_per_token_logps")]
    assert kept
    assert trainer._summaries
    trainer.forget_batch()
    assert [each() for each in kept] == [None] * len(kept)
    assert (trainer._summaries, held) == ([], [])
    assert metrics_of(trainer) == metrics


@pytest.mark.parametrize(
    ("free", "limit", "expected"),
    [
        (50, 80, 60),  # alone on the GPU: what is free, and 10 of the reserved 30
        (50, 40, 20),  # a share of 40: 10 more may be reserved
        (5, 40, 15),  # somebody else has taken the rest
        (50, 20, 10),  # the share is smaller than what was reserved before
    ],
)
def test_what_torch_can_still_give_out(free: int, limit: int, expected: int) -> None:
    assert allocatable_bytes(free, 30, 20, limit) == expected


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C functions of a CUDA build of torch: a GPU of 1000 bytes, of which torch has reserved 300 and uses 200."""
    allocated = {"all": {"current": 200, "peak": 600}}
    stats = {"allocated_bytes": allocated, "reserved_bytes": {"all": {"current": 300}}}
    functions = {
        "_cuda_getDevice": lambda: 0,
        "_cuda_getMemoryFraction": lambda index: 0.5,
        "_cuda_memoryStats": lambda index: stats,
        "_cuda_resetPeakMemoryStats": lambda index: None,
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch._C, name, function, raising=False)
    for module in (torch.cuda, torch.cuda.memory):
        monkeypatch.setattr(module, "_lazy_init", lambda: None)
        monkeypatch.setattr(module, "is_initialized", lambda: True)
    runtime = SimpleNamespace(cudaMemGetInfo=lambda index: (600, 1000))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
@pytest.mark.usefixtures("driver")
def test_a_pass_is_measured_on_the_device_that_accelerate_names(device: str) -> None:
    tokens = 10_240
    fitting = PassMemory(torch.device(device)).fitting_tokens(tokens)
    # 100 of the reserved and 200 up to the limit are left, and a pass took 400.
    assert fitting == tokens_within(300, 400, tokens) == 6144


def refuse(trainer: SlipstreamTrainer, steps: set[int], most_rows: int) -> None:
    """From these steps on the device has no memory for the backward pass of more rows. That is where a step has gone furthest."""
    backward = trainer.accelerator.backward
    forward = trainer.forward_pass
    rows: list[int] = []

    def seen(batch: Any, **options: Any) -> Any:
        rows.append(len(batch["row"]))
        return forward(batch, **options)

    def refusing(loss: torch.Tensor) -> None:
        if trainer.state.global_step + 1 in steps and rows[-1] > most_rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand more")
        backward(loss)

    trainer.forward_pass = seen
    trainer.accelerator.backward = refusing


def taken(trainer: SlipstreamTrainer) -> tuple[dict[int, MicroBatchPlan], list[list[float]], torch.Tensor]:
    """How the steps were cut, their metrics, and the weights after them."""
    cuts, metrics = {}, []
    step = trainer.training_step

    def noted(*arguments: Any) -> torch.Tensor:
        loss = step(*arguments)
        assert trainer.last is not None
        cuts[trainer.last.plan.step] = trainer.last.plan
        metrics.append([float(loss)] + [value for name, value in metrics_of(trainer).items() if "time" not in name])
        return loss

    trainer.training_step = noted
    trainer.train()
    return cuts, metrics, torch.cat([parameter.detach().flatten() for parameter in lora_parameters(trainer)])


@pytest.mark.long
def test_a_refused_step_is_cut_again_and_taken_again_bit_for_bit(
    tmp_path: Path, one_layer_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_cuts, "FIRST_TOKENS", 64)  # all rows
    refused = trainer_of(tmp_path / "a", one_layer_model, {})
    refuse(refused, {2, 3, 4}, 4)  # in the second step over the first batch
    cuts, metrics, weights = taken(refused)
    assert [cuts[step].tokens for step in (1, 2, 3, 4)] == [64, 16, 16, 16], "halved twice"
    assert all(cut.random_state is not None for cut in cuts.values())
    assert refused.state.global_step == 4

    again = trainer_of(tmp_path / "b", one_layer_model, cuts)
    torch.rand(100)  # whatever was drawn before
    cuts_again, metrics_again, weights_again = taken(again)
    assert cuts_again == cuts
    assert metrics_again == metrics
    assert torch.equal(weights_again, weights)

    other = taken(trainer_of(tmp_path / "c", one_layer_model, {}))
    assert [cut.tokens for cut in other[0].values()] == [64] * 4
    assert not torch.equal(other[2], weights), "the comparison must compare something"


@pytest.mark.long
def test_without_dropout_no_random_state_is_kept(tmp_path: Path, one_layer_model: Path) -> None:
    config = run_config(tmp_path, one_layer_model, trainer=OPTIONS | {"max_steps": 1})
    trainer = slipstream_trainer(config, one_layer_model)
    trainer._batches = batches()
    assert taken(trainer)[0] == {1: MicroBatchPlan(1, step_cuts.FIRST_TOKENS, None)}


@pytest.mark.long
def test_a_step_of_single_rows_that_is_refused_ends_the_run(tmp_path: Path, one_layer_model: Path) -> None:
    trainer = trainer_of(tmp_path, one_layer_model, {})
    refuse(trainer, {1}, 0)
    with pytest.raises(
        DeviceError, match=r"for a single completion with its prompt \(CUDA out of memory. Tried to allocate 2.00"
    ):
        trainer.train()


@pytest.mark.long
def test_a_fixed_number_of_tokens_is_kept_and_the_run_ends(tmp_path: Path, one_layer_model: Path) -> None:
    trainer = trainer_of(tmp_path, one_layer_model, {})
    trainer._splitter = StepSplitter(64, trainer._ranks, lambda step: None)
    refuse(trainer, {1}, 0)
    said = r"no memory for a pass of 64 tokens \(CUDA out of memory.*\); lower pipeline.trainer_tokens_per_micro_batch"
    with pytest.raises(DeviceError, match=said) as caught:
        trainer.train()
    assert caught.value.exit_code == ExitCode.DEVICE == 71


@pytest.mark.long
@pytest.mark.parametrize(
    "refusal",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
        ),
    ],
)
def test_ranks_that_share_the_base_give_no_pass_up_and_the_run_ends(
    tmp_path: Path, one_layer_model: Path, monkeypatch: pytest.MonkeyPatch, refusal: RuntimeError
) -> None:
    monkeypatch.setattr(SlipstreamTrainer, "is_sharded", True)
    trainer = trainer_of(tmp_path, one_layer_model, {})
    passes: list[int] = []

    def refusing(batch: Any, **options: Any) -> Any:
        passes.append(len(batch["row"]))
        raise refusal

    trainer.forward_pass = refusing
    with pytest.raises(DeviceError, match=r"the trainer's device is out of memory: .*go on with --resume") as caught:
        tries_taken_back(trainer, tmp_path)
    assert caught.value.exit_code == ExitCode.DEVICE
    assert len(passes) == 1, "nobody tried it again"


def tries_taken_back(trainer: SlipstreamTrainer, folder: Path, taken_back: list[int] | None = None) -> None:
    """Trains in a loop whose feed is at the batch that ends with step 7."""
    unused: Any = None
    feed: Any = SimpleNamespace(last=SimpleNamespace(last_step=7))
    run = Run(unused, RunStart("r"), feed, unused, unused)
    run.trainer = trainer
    run.undo_try = lambda: ([] if taken_back is None else taken_back).append(7)
    run.train()


@pytest.mark.long
@pytest.mark.parametrize(
    ("setting", "sharded", "expected"),
    [(64, False, [7]), ("auto", True, [7]), ("auto", False, [])],
    ids=["too many tokens were asked for", "ranks give no pass up", "a completion is too large"],
)
def test_a_step_that_smaller_passes_would_fit_is_no_try_of_its_batch(
    tmp_path: Path,
    one_layer_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    setting: Any,
    sharded: bool,
    expected: list[int],
) -> None:
    monkeypatch.setattr(SlipstreamTrainer, "is_sharded", sharded)
    trainer = trainer_of(tmp_path, one_layer_model, {})
    trainer._splitter = StepSplitter(setting, trainer._ranks, lambda step: None)
    refuse(trainer, {1}, 0)
    taken_back: list[int] = []
    with pytest.raises(DeviceError):
        tries_taken_back(trainer, tmp_path, taken_back)
    assert taken_back == expected


@pytest.mark.long
@pytest.mark.usefixtures("float64")
def test_what_one_rank_has_no_memory_for_no_rank_does(tmp_path: Path, one_layer_model: Path) -> None:
    """`top_entropy_quantile` has ranks exchange something in the middle of a step."""

    def step(ranks: ThreadRanks) -> Any:
        trainer = trainers[ranks.rank]
        trainer._ranks = ranks
        trainer._splitter = StepSplitter("auto", ranks, lambda step: None)
        trainer.recipe = trainer.recipe.__class__(**vars(trainer.recipe) | {"rank": ranks.rank, "world": ranks.world})
        trainer.create_optimizer_and_scheduler(2)
        forward = trainer.forward_pass
        if ranks.rank == 1:

            def refusing(batch: Any, **options: Any) -> Any:
                if len(batch["row"]) > 1:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                return forward(batch, **options)

            trainer.forward_pass = refusing
        trainer._splitter.begin(trainer.recipe, batches()[0].groups)
        loss = trainer.training_step(trainer.model, trainer._splitter.split(1), None)
        assert trainer.last is not None
        return float(loss), trainer.last.plan, [parameter.grad for parameter in lora_parameters(trainer)]

    config = run_config(tmp_path, one_layer_model, trainer={"top_entropy_quantile": 0.5})
    trainers = [slipstream_trainer(config, one_layer_model) for _ in range(2)]
    (loss, cut, gradient), (other_loss, other_cut, other_gradient) = on_ranks(2, step)
    assert (loss, cut) == (other_loss, other_cut)
    assert cut.tokens < step_cuts.FIRST_TOKENS
    assert all(torch.equal(one, other) for one, other in zip(gradient, other_gradient, strict=True))


def test_another_error_is_no_lack_of_memory() -> None:
    def work(ranks: ThreadRanks) -> None:
        with oom_on_all_ranks(ranks):
            raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        on_ranks(1, work)


def test_the_rank_that_refused_is_named_on_the_others() -> None:
    def work(ranks: ThreadRanks) -> str:
        try:
            with oom_on_all_ranks(ranks):
                if ranks.rank == 1:
                    raise RuntimeError(
                        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes\nmore"
                    )
        except OutOfMemory as error:
            return str(error)
        return "it went on"

    own = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
    assert on_ranks(2, work) == ["on rank 1", own]


@pytest.mark.parametrize(
    ("free", "taken_bytes", "fitting"),
    [
        (40 * 2**30, 8 * 2**30, 65_536),  # 16384 * 40 / 8 * 0.8
        (2 * 2**30, 8 * 2**30, 3072),  # 3276.8, a multiple of 1024
        (1, 8 * 2**30, 1024),
        (2**50, 8 * 2**30, 131_072),
        (2**30, 0, 131_072),
    ],
)
def test_how_many_tokens_there_is_room_for(free: int, taken_bytes: int, fitting: int) -> None:
    assert tokens_within(free, taken_bytes, 16_384) == fitting


@pytest.mark.parametrize("has_adapter", [False, True])
def test_copies_of_weights_are_no_bytes_of_tokens(has_adapter: bool) -> None:
    """The 16-bit copies of autocast, also where a pass has as many tokens as a side of a weight. The first layer of an adapted
    model needs no gradient for its input, so those of keys and values are not kept."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **shape)).float().train()
    if has_adapter:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"])).base_model.model
    of_weights = 2 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 64)
    if has_adapter:
        of_weights += 2 * 4 * (32 + 32 + 64 + 32) - 2 * 32 * (32 + 16 + 16) - 2 * 4 * 32
    found = []
    for num_tokens in (16, 32, 64, 100):
        with torch.autocast("cpu", torch.bfloat16), recomputation._counted(model.model.layers[0]) as counted:
            loss = model(input_ids=torch.ones(1, num_tokens, dtype=torch.int64), use_cache=False).logits.sum()
        found.append((counted[0] / num_tokens, counted[2]))
        del loss
    assert set(found) == {found[0]}
    assert found[0][1] == of_weights
