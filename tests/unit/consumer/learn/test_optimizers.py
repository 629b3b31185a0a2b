"""Optimizers by their names: the state that each keeps, as the estimate of memory has it, and those that are refused."""

import pytest
import torch
from trl import GRPOConfig

from consumer.learn.options import check_optimizer
from protocol.config.trainer_keys import refusal
from protocol.errors import ConfigError
from protocol.gpu.memory import optimizer_bytes

OF_BITSANDBYTES = (
    "adamw_8bit",
    "ademamix",
    "ademamix_8bit",
    "lion_8bit",
    "lion_32bit",
    "rmsprop_bnb",
    "rmsprop_bnb_8bit",
)
SHAPE = (256, 256)  # bitsandbytes keeps the state of less than 4,096 elements in float32


@pytest.mark.parametrize(
    "name", ["adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop", *OF_BITSANDBYTES]
)
def test_the_state_of_a_parameter(tmp_path: object, name: str) -> None:
    if name in OF_BITSANDBYTES:
        pytest.importorskip("bitsandbytes").optim.GlobalOptimManager.get_instance().initialize()  # not of other tests
    from transformers import Trainer

    for arguments in (None, "momentum=0.9") if name in ("sgd", "rmsprop") else (None,):
        options = GRPOConfig(str(tmp_path), optim=name, optim_args=arguments, use_cpu=True, bf16=False)
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(options)
        parameter = torch.nn.Parameter(torch.ones(SHAPE))
        optimizer = kind([parameter], **settings)
        parameter.grad = torch.full(SHAPE, 0.5)
        optimizer.step()
        kept = [each for each in optimizer.state[parameter].values() if torch.is_tensor(each) and each.numel() > 1]
        tables = sum(each.numel() == 256 and each.dtype == torch.float32 for each in kept) * 256 * 4  # of 8-bit codes
        found = (sum(each.numel() * each.element_size() for each in kept) - tables) / parameter.numel()
        assert found == pytest.approx(optimizer_bytes(name, arguments), rel=0.02, abs=0.05)


@pytest.mark.parametrize("name", ["schedule_free_adamw", "adamw_torch_8bit", "adamw_torch_4bit", "adamw_torch_xla"])
def test_what_would_do_something_else_is_refused_with_another_one(name: str) -> None:
    reason = refusal("optim", name)
    assert reason is not None
    assert "; use adamw" in reason
    assert refusal("optim", "adamw_torch") is refusal("optim", "adafactor") is None


@pytest.mark.parametrize(
    ("name", "package"),
    [("galore_adamw", "galore-torch"), ("apollo_adamw", "apollo-torch"), ("stable_adamw", "torch-optimi")],
)
def test_an_optimizer_without_its_library_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=f"trainer.optim: {name} needs {package}"):
        check_optimizer(name, on_gpu=True)
    check_optimizer("adamw_torch", on_gpu=True)
