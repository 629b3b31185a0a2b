"""Weights that train, spread over the ranks (FSDP2): passes, snapshots, checkpoints.

Guarantee: each rank keeps a part of every parameter, of its gradient and of its optimizer state, in the types that one process
has. A pass gathers a layer at a time, of linear layers what autocast would make of them. Gradients are summed over the ranks, in
float32 or wider. Weights are gathered one parameter at a time, and rank 0 alone keeps what comes together. A checkpoint is that
of one process, whatever the number of ranks, so any other number goes on from it with the same bits. Rank 0 reads it; the others
get their parts.

All ranks make as many passes, and call every function here, in the same order.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only
from transformers.trainer import OPTIMIZER_NAME

from consumer.link.patch_maker import KEPT_FILE
from consumer.link.weight_snapshots import whole
from protocol.errors import ConfigError

_Result = TypeVar("_Result")


def shard_weights(model: Any, layers: Sequence[torch.nn.Module], mesh: DeviceMesh, *, casts: bool, keeps: bool) -> None:
    """Spread all parameters of a causal language model.

    Args:
        casts: whether passes are under autocast to bfloat16. Then linear layers are gathered in 16 bits.
        keeps: whether this rank keeps what `state_dict` gathers.
    """
    in_16_bits = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in layers:
        linear = [module for module in layer.modules() if isinstance(module, torch.nn.Linear)]
        if casts and linear:
            fully_shard(linear, mesh=mesh, mp_policy=in_16_bits)
        fully_shard(layer, mesh=mesh)
    # Gathered anew in each pass: between two of them weights are loaded, or exchanged with those of the reference policy.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # the only kind that gloo has
    model.within = lambda call: call()
    register_fsdp_forward_method(model, "within")
    model.register_state_dict_post_hook(lambda _, state, *__: _gather(state, _tied(model), keeps=keeps))


def spreads_weights(model: Any) -> bool:
    """Return whether this causal language model was given to `shard_weights`."""
    return isinstance(model, FSDPModule)


def gathered(model: Any, call: Callable[[], _Result]) -> _Result:
    """Return the result of `call`, which makes a pass through parts of the model: embeddings, last norm and LM head are whole in
    it, and in the way back from what it returns."""
    found: _Result = model.within(call) if spreads_weights(model) else call()
    return found


def share_state(optimizer: Any, *, keeps: bool) -> None:
    """Let the state of an optimizer of spread weights be read and loaded as that of one process."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]

    def gather(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        of_parameters = {number: dict(values) for number, values in state["state"].items()}
        for values in of_parameters.values():
            _gather(values, {}, keeps=keeps)
        return state | {"state": of_parameters}

    def spread(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        of_parameters = {
            number: {name: _part(each, parameters[number]) for name, each in values.items()}
            for number, values in state["state"].items()
        }
        return state | {"state": of_parameters}

    optimizer.register_state_dict_post_hook(gather)
    optimizer.register_load_state_dict_pre_hook(spread)


def load_weights(model: Any, folder: Path | None) -> None:
    """Load the weights of a checkpoint.

    Args:
        folder: on rank 0; the others give None.

    Raises:
        ConfigError: a parameter is missing, or has another shape.
    """
    files = dict[str, Path]()
    for file in folder.glob("*.safetensors") if folder is not None else ():
        with safe_open(file, "pt") as opened:
            files |= dict.fromkeys(opened.keys(), file)
    for name, parameter in model.named_parameters():
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        if folder is not None:
            if name not in files:
                raise ConfigError(f"run_dir: {folder} has no weights {name}; it is a checkpoint of another model")
            with safe_open(files[name], "pt") as opened:
                values = opened.get_tensor(name).to(parameter.dtype)
            if values.shape != parameter.shape:
                raise ConfigError(
                    f"run_dir: {name} in {folder} has shape {list(values.shape)}, expected {list(parameter.shape)}; it is a "
                    "checkpoint of another model"
                )
        with torch.no_grad():
            parameter.to_local().copy_(_part(values, parameter).to_local())


def without_weights(checkpoint: Path, to: Path) -> Path:
    """Copy to a folder, which is returned, what the other ranks need of a checkpoint: of an optimizer's tensors shapes alone."""
    for file in checkpoint.iterdir():
        if file.name == OPTIMIZER_NAME:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            torch.save(
                tree_map_only(torch.Tensor, lambda each: each.to("meta") if each.dim() else each, state), to / file.name
            )
        elif file.is_file() and file.suffix != ".safetensors" and file.name != KEPT_FILE:
            shutil.copyfile(file, to / file.name)
    return to


def _tied(model: Any) -> dict[str, str]:
    """Return for each parameter with several names the first of them."""
    first: dict[torch.nn.Parameter, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first[each] for name, each in named if first.setdefault(each, name) != name}


def _gather(state: dict[str, Any], tied: dict[str, str], *, keeps: bool) -> None:
    """Replace parts by the whole in host memory, or by nothing."""
    for name, each in state.items():
        if name in tied:
            state[name] = state[tied[name]]
        elif isinstance(each, DTensor):
            found = whole(each.detach())
            state[name] = found.cpu() if keeps else found.new_empty(0)


def _part(values: Any, like: Any) -> Any:
    """Return this rank's part of a tensor of the shape of a parameter; other values as they are. Rank 0 has the numbers."""
    if not isinstance(values, torch.Tensor) or isinstance(values, DTensor) or values.shape != like.shape:
        return values
    device = like.device
    found = torch.empty(values.shape, dtype=values.dtype, device=device) if values.is_meta else values.to(device)
    return distribute_tensor(found, like.device_mesh, like.placements)
