"""The model that learns: it is loaded, quantized, given its adapter, and placed.

Guarantee: a base is loaded as a whole, to the GPU of a trainer with one rank, or to host memory. From there several ranks share
it, and a trainer fetches it in its turn. A base that does not fit is refused with its size, and no part of it is offloaded.
Neither a device without memory nor a lost rank is taken for a wrong configuration. What trains is float32 whatever the base is.

Vision-language checkpoints: an adapter has the names that its modules have in the whole checkpoint, so transformers, PEFT and
vLLM take it as it is. Nothing that sees images is adapted, or stays in memory.

A base that ranks share (FSDP2, https://arxiv.org/abs/2304.11277) is spread over them layer by layer. A pass sees whole layers,
with the very numbers of the model files; adapter, embeddings and LM head are whole on every rank. A pass through such a model
gathers each layer from all ranks. So all ranks make as many passes, forward and backward, in the same order. Weights that train
themselves are spread whole: see `consumer.learn.shards`.
"""

import contextlib
import fnmatch
import logging
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    PreTrainedModel,
    set_seed,
)
from trl.trainer.utils import disable_dropout_in_model

from consumer.learn.adapted_linear import use_adapted_products
from consumer.learn.inference import compute_as_in_inference, restore_drops
from consumer.learn.memory import is_out_of_memory, num_refusals, room_of_gpu
from consumer.learn.options import need_bitsandbytes
from consumer.learn.rotary import follow_engine
from consumer.learn.shards import shard_weights
from consumer.link.merging import adapt
from consumer.link.probe import PolicyProbe
from consumer.link.weight_snapshots import check_names
from consumer.ranks.exchange import ALONE, Ranks
from consumer.ranks.presence import is_broken_connection
from protocol.config.data import ModelSection
from protocol.config.learning import GpuSharing, ShardBase
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, DeviceError, SlipstreamError, is_device_failure
from protocol.gpu.memory import base_of, gib
from protocol.library_errors import reading
from protocol.wire.model_folder import vision_language

logger = logging.getLogger(__name__)

MORE_ROOM = (
    "set model.quantization: nf4, let several GPUs share a base that is not quantized (--gpu 0,1 and pipeline.shard_base: auto), "
    "or take a GPU with more memory"
)

_LARGEST_SHARE = 0.6  # of a device that a whole base may take: activations, gradients and optimizer want the rest


# Loading.


def load_policy(
    config: RunConfig, options: Any, lora: LoraConfig | None, folder: Path, ranks: Ranks = ALONE, *, pad_token_id: int
) -> Any:
    """Load the base and give it the adapter that is trained, on the device unless the GPU is used in turns. All ranks call it.

    Args:
        options: the run's GRPOConfig.
        lora: None: the base's own weights train, those that `trainable` names.

    Raises:
        ConfigError: the options do not fit the model.
        DeviceError: the GPU has less room than the base takes.
    """
    on_gpu, gpu = not options.use_cpu, config.pipeline.gpu
    if on_gpu:
        check_room(config, folder, ranks.world)
    set_seed(options.seed)  # PEFT draws the adapter
    quantization = quantization_config(config.model)
    of_run: dict[str, Any] = {"device_map": device_map(gpu, on_gpu=on_gpu, num_ranks=ranks.world)}
    if quantization is not None:
        of_run["quantization_config"] = quantization
    base = load_model(folder, **{"trust_remote_code": options.trust_remote_code} | options.model_init_kwargs | of_run)
    compute_as_in_inference(base)
    base.config.get_text_config().pad_token_id = base.generation_config.pad_token_id = pad_token_id
    router_loss_coef(options, base)
    follow_engine(base, config)
    model = base
    if lora is None:
        choose_trainable(base, config.trainable)
        check_names(base, folder)
    else:
        model = _adapted(config, base, within_text_model(lora, base), folder, ranks)
        if isinstance(base.get_output_embeddings(), BaseTunerLayer):
            raise ConfigError(
                "lora.target_modules: log-probs are made with the weights of lm_head alone, so leave it out"
            )
        use_adapted_products(model)
    if options.gradient_checkpointing:
        model.enable_input_require_grads()
    for (
        module
    ) in model.modules():  # bitsandbytes would lay the base out anew, in bfloat16, in the first pass on some CPUs
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    if options.disable_dropout:
        disable_dropout_in_model(model)
    if options.cast_lm_head_to_fp32:
        _cast_lm_head(base)
    drop_towers(base)
    if (
        gpu != "turns" and getattr(base, "quantization_method", None) != "bitsandbytes"
    ):  # which lies where it was loaded
        shard_base(config.shard_base, base, ranks, options.device, trains=lora is None, casts=options.bf16)
        model.to(options.device)
    return model


def _adapted(config: RunConfig, base: Any, lora: LoraConfig, folder: Path, ranks: Ranks) -> PeftModel:
    if not config.merged_keys:
        return get_peft_model(base, lora)
    model = adapt(base, lora)
    check_names(model, folder)
    logger.log(
        logging.INFO if ranks.rank == 0 else logging.DEBUG,
        "vLLM cannot serve an adapter with lora.%s: the trainer merges it, and policies travel as patches of the weights",
        ", lora.".join(config.merged_keys),
    )
    return model


def base_model(model: Any) -> Any:
    """Return the causal language model, with the layers of an adapter in it where there is one."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def choose_trainable(model: Any, patterns: list[str]) -> None:
    """Let the parameters train whose names one of these patterns fits (all, without patterns), and no others.

    Raises:
        ConfigError: a pattern fits none.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(f"trainable: no parameter has a name like {pattern!r}; names are such as {names[-1]!r}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))


def save_weights(model: Any, tokenizer: Any, folder: str) -> None:
    """Write a model in bfloat16, with its tokenizer, as transformers and vLLM load it. Tensors of two names are written once."""
    cast: dict[int, torch.Tensor] = {}
    state = {name: cast.setdefault(each.data_ptr(), each.bfloat16()) for name, each in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=state)
    config = type(model.config).from_pretrained(folder)
    config.dtype = torch.bfloat16  # `save_pretrained` takes it from the parameters
    restore_config(config, Path(model.name_or_path))
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def restore_config(config: Any, folder: Path) -> None:
    """Undo what is done for training: cache and dropout are again those of the model in this folder."""
    given = type(config).from_pretrained(folder)
    config.use_cache = getattr(given, "use_cache", True)
    restore_drops(config, given)


def load_model(folder: Path, **options: Any) -> Any:
    """Load the whole checkpoint, by `from_pretrained` with these options.

    Raises:
        ConfigError: it lacks weights, which transformers would draw, or has them in other shapes.
    """
    report = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, loaded = _automatic(folder).from_pretrained(folder, **report, **options)
    if differing := sorted(loaded["mismatched_keys"]):
        name, there, here = differing[0]
        raise ConfigError(
            f"model.path: {folder}/config.json does not fit {len(differing)} of its weights, such as {name}: {list(there)}, and "
            f"by the configuration {list(here)}; take configuration and weights of one model"
        )
    if missing := sorted(loaded["missing_keys"]):
        raise ConfigError(
            f"model.path: {folder} lacks {len(missing)} weights of a {type(model).__name__}, such as {missing[0]}; take all "
            "files of a model that generates text"
        )
    return model


def _automatic(folder: Path) -> Any:
    return AutoModelForCausalLM if vision_language(folder) is None else AutoModelForImageTextToText


def router_loss_coef(options: Any, base: Any) -> float:
    """Return the weight of the load-balancing loss of experts; 0 unless it is set, whatever the model's configuration has.

    Raises:
        ConfigError: a weight is set, and the model has no such loss.
    """
    chosen = float(options.router_aux_loss_coef or 0.0)
    if chosen and not hasattr(base.config.get_text_config(), "output_router_logits"):
        raise ConfigError(
            f"trainer.router_aux_loss_coef: {type(base).__name__} has no experts whose load could be balanced; remove it"
        )
    return chosen


def _cast_lm_head(base: Any) -> None:
    """Let an LM head with weights of its own (`check_model`) compute in float32, whatever the hidden states are."""
    head = base.lm_head.float()
    head.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))


@contextlib.contextmanager
def loading(refused: str, fix: str = MORE_ROOM) -> Iterator[None]:
    """Surround the calls by which transformers, PEFT and TRL load a model or weights.

    Args:
        refused: begins the message when one of them refuses.
        fix: ends the message when the device has no memory.

    Raises:
        DeviceError: the device has no memory for the weights, or failed.
        ConfigError: a library refused.
    """
    before = num_refusals()
    try:
        yield
    except SlipstreamError:
        raise
    except Exception as error:
        if is_broken_connection(error):
            raise
        # transformers turns an error of a conversion, such as a quantization, into one without a kind.
        if is_out_of_memory(error) or num_refusals() > before:
            raise DeviceError(f"the trainer's device has no memory for the model: {error}; {fix}") from error
        if is_device_failure(error):
            raise DeviceError(
                f"the GPU failed while the model was loaded: {error}; nvidia-smi shows its state"
            ) from error
        with reading(refused):
            raise


# The place.


def device_map(gpu: GpuSharing, *, on_gpu: bool, num_ranks: int = 1) -> dict[str, int] | None:
    """Choose the place for `from_pretrained`: the one GPU that this process sees, or host memory (None)."""
    return {"": 0} if on_gpu and num_ranks == 1 and gpu != "turns" else None


def check_room(config: RunConfig, folder: Path, num_ranks: int) -> None:
    """Refuse a base that each rank would have as a whole on a GPU with less room. In turns the room is measured at each turn.

    Raises:
        DeviceError: the GPU has less room than the base takes.
    """
    may_spread = num_ranks > 1 and config.shard_base != "none"
    if config.pipeline.gpu == "turns" or may_spread:
        return
    shared = "let several GPUs share it (--gpu 0,1 and pipeline.shard_base: auto)"
    fix = MORE_ROOM if config.lora is not None else f"{shared}, train an adapter, or take a GPU with more memory"
    check_base_fits(base_of(folder, config.trainer_dtype, config.model.quantization), fix)


def check_base_fits(base: int, fix: str) -> None:
    """Refuse a base of `base` bytes if the GPU has less room."""
    room, total = room_of_gpu(torch.device("cuda"))
    if base > room:
        raise DeviceError(
            f"model.path: the base takes {gib(base)} of a GPU that has {gib(room)} of {gib(total)} left (nvidia-smi shows its "
            f"other processes); {fix}"
        )


def is_sharded(model: Any) -> bool:
    """Return whether this causal language model, which may have LoRA layers, was given to `shard_base`."""
    return isinstance(model, FSDPModule) or isinstance(text_model(model), FSDPModule)


def shard_base(
    choice: ShardBase, model: Any, ranks: Ranks, device: torch.device, *, trains: bool = False, casts: bool = False
) -> None:
    """Spread the layers over the ranks where that is asked for, or where the base is too large to be whole on each, and all
    weights where they train. What was spread is on the device afterwards; the rest is where it was. All ranks call it.

    Args:
        model: causal language model.
        device: on which this rank computes.
        trains: whether its own weights train, and no LoRA layers.
        casts: whether passes are under autocast to bfloat16.

    Raises:
        ConfigError: this model cannot be sharded.
    """
    if ranks.world == 1 or choice == "none":
        return
    if choice == "auto" and not trains and not _is_too_large(model, ranks, device):
        return
    layers = [
        module for module in text_model(model).modules() if type(module).__name__ in (model._no_split_modules or ())
    ]
    if not layers:
        raise _not_shardable(f"{type(model).__name__} does not name those of its modules that are decoder layers")
    mesh = ranks.mesh
    if trains:
        shard_weights(model, layers, mesh, casts=casts, keeps=ranks.rank == 0)
        if ranks.rank == 0:
            logger.info("the weights lie on %d ranks, with gradients and optimizer: each keeps a part", ranks.world)
        return
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    for layer in layers:
        fully_shard(layer, mesh=mesh, ignored_params=trained | _of_other_types(layer))
    # The modules around the layers stay whole. As the root of all of them it lets one layer be gathered while another computes.
    fully_shard(text_model(model), mesh=mesh, ignored_params=set(model.parameters()))
    if ranks.rank == 0:
        logger.info("the base lies on %d ranks: each keeps a part of its %d layers", ranks.world, len(layers))


def _is_too_large(model: Any, ranks: Ranks, device: torch.device) -> bool:
    base_bytes: int = sum(
        tensor.numel() * tensor.element_size() for tensor in model.parameters() if not tensor.requires_grad
    )
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory
    else:
        room = psutil.virtual_memory().total // ranks.world
    rooms = ranks.gather({"room": torch.tensor([float(room)])})["room"]
    return base_bytes > _LARGEST_SHARE * float(rooms.min())


def _of_other_types(layer: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Return the few frozen parameters, such as those of norms, of another type than most of the layer: they stay whole, because
    a gathered layer must be of one type. (bitsandbytes 0.50: a spread NF4 base computes rightly once and wrongly from
    the second pass on, one of int8 raises.)"""
    frozen = [parameter for parameter in layer.parameters() if not parameter.requires_grad]
    sizes: Counter[torch.dtype] = Counter()
    for parameter in frozen:
        sizes[parameter.dtype] += parameter.numel()
    [(most, _)] = sizes.most_common(1)
    if not most.is_floating_point:
        raise _not_shardable(
            f"its layers are quantized ({most}), and weights that were spread and gathered again do not know how they were"
        )
    return {parameter for parameter in frozen if parameter.dtype != most}


def _not_shardable(why: str) -> ConfigError:
    return ConfigError(
        f"pipeline.shard_base: {why}; set it to none, which keeps the whole base on every rank, and choose GPUs that hold it"
    )


# Text models of vision-language checkpoints.


def text_model(model: Any) -> Any:
    """Return the part of a causal language model, or of a vision-language model, that makes the hidden states of text."""
    return model.get_submodule(text_model_name(model))


def text_model_name(model: Any) -> str:
    """Return the name of the text model in the whole model: the innermost model of transformers with the embeddings of tokens."""
    embeddings = model.get_input_embeddings()
    parts = next(name for name, module in model.named_modules() if module is embeddings).split(".")
    names = [".".join(parts[:length]) for length in range(1, len(parts))]
    inner = [name for name in names if isinstance(model.get_submodule(name), PreTrainedModel)]
    return inner[-1] if inner else str(model.base_model_prefix)


def outline(folder: Path, *, trust_remote_code: bool) -> Any:
    """Return the model in this folder as its configuration describes it, without memory for weights."""
    automatic, config = _automatic(folder), AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        return automatic.from_config(config, trust_remote_code=trust_remote_code)


def within_text_model(lora: LoraConfig, model: Any) -> LoraConfig:
    """Restrict the adapter to the text model of a vision-language model. PEFT takes modules by parts of their names, and towers
    have `q_proj` too."""
    if not _sees(model):
        return lora
    names = dict(model.named_modules(remove_duplicate=False))
    head = next(name for name, module in names.items() if module is model.get_output_embeddings())
    outside = rf"(?!{re.escape(text_model_name(model))}\.|{re.escape(head)}$).*"
    excluded = lora.exclude_modules or ()
    if not isinstance(excluded, str):
        excluded = "|".join(rf"(?:.*\.)?{re.escape(name)}" for name in sorted(excluded))
    return replace(lora, exclude_modules=f"{outside}|{excluded}" if excluded else outside)


def drop_towers(model: Any) -> None:
    """Free the parts of a vision-language model beside its text model, once it has its adapter."""
    if not _sees(model):
        return
    kept = {model.get_output_embeddings(), text_model(model)}
    within, parts = model, text_model_name(model).split(".")
    for part in parts:
        for name, child in list(within.named_children()):
            if name != part and kept.isdisjoint(child.modules()):
                setattr(within, name, None)
        within = getattr(within, part)


def _sees(model: Any) -> bool:
    return model.config.get_text_config() is not model.config


# A base of 4 or 8 bits per weight.


def quantization_config(model: ModelSection) -> BitsAndBytesConfig | None:
    """Return the option by which transformers quantizes the base (`model.quantization`); None: it stays as it is in its files.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    if model.quantization is None:
        return None
    need_bitsandbytes(f"model.quantization: {model.quantization}")
    if model.quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=getattr(torch, model.dtype)
    )


@dataclass(eq=False)
class UnquantizedProbe(PolicyProbe):
    """A probe of the adapter of `trained` on the base in `model.dtype`, which is the engine's, in host memory.

    So a swap is proved as closely as without quantization. The importance ratio covers the difference of the two bases.
    """

    trained: PeftModel | None = None

    def _passes(self, *, is_base: bool) -> torch.Tensor:
        if not is_base:
            set_peft_model_state_dict(self.model, get_peft_model_state_dict(self.trained))
        return super()._passes(is_base=is_base)


def unquantized_probe(
    rows: np.ndarray, every: int, config: RunConfig, folder: Path, lora: LoraConfig, trained: PeftModel
) -> PolicyProbe:
    """Load the base once more, unless `every` is 0 and no policy is measured.

    Args:
        rows: see `PolicyProbe`.
        folder: of the base.
        trained: on the quantized base.
    """
    if not every:
        return PolicyProbe(rows, every, trained, contextlib.nullcontext)
    dtype = getattr(torch, config.model.dtype)
    base = load_model(folder, dtype=dtype, trust_remote_code=config.model.trust_remote_code)
    follow_engine(base, config)
    like_trained = get_peft_model(base, within_text_model(lora, base))
    drop_towers(base)
    return UnquantizedProbe(rows, every, like_trained, contextlib.nullcontext, trained=trained)
