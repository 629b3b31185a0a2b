"""`slipstream export` merges an adapter into its base model and writes a folder that needs no PEFT, or the adapter alone. Where
policies travel as patches it writes the model with the bits that were published.

Guarantee: the folder appears whole and on the disk, with a model card. A merged model, when it is read back, computes what base
model and adapter compute together; nothing leaves the machine unless a repository is named. The chosen adapter was written
whole; if there is no such adapter, the error lists those that there are.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers.utils import logging as transformers_logging

from consumer.learn.adapters import TENSORS_FILE, AdapterFolder
from consumer.learn.checkpoints import CONFIG_FILE
from consumer.learn.model import restore_config
from consumer.learn.options import build_lora
from consumer.link.merging import adapt, load_beginning, merged_weights
from protocol.command_line import print_progress
from protocol.config.operation import TOLERANCES
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, ExitCode
from protocol.library_errors import reading
from protocol.wire import weight_patch
from protocol.wire.adapter_blob import BlobError
from protocol.wire.model_check import checkpoint_problems
from protocol.wire.model_source import checked
from protocol.wire.patch_streams import composed
from slipstream.adapters import choose_adapter
from slipstream.model_card import Kind, model_card
from slipstream.new_folder import new_folder
from slipstream.run_inputs import RunInputs

_ROWS, _LENGTH = 4, 32
_MOST_LOST = 0.5  # the largest share of the adapter's change that rounding may lose
_OF_IMAGES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
"""Files of a vision-language checkpoint that no run reads, and that a server of images needs."""
_NOISE = 1e-4  # nats; a difference below this is no loss


def run(
    config: RunConfig,
    gpus: list[int],
    *,
    which: str,
    to: Path,
    repository: str | None,
    dequantized: bool = False,
    is_adapter: bool = False,
) -> ExitCode:
    """Write the folder `to` from the adapter that `which` names, and upload it if a repository of the hub is named.
    `ConfigError` if there is no such adapter, the folder exists, or the merged model is not what was trained. It is merged into
    the base model, or into what is left of that when it was quantized as for training and is `dequantized`. If `is_adapter`, the
    folder has the adapter alone."""
    full = config.lora is None
    if full and is_adapter:
        raise ConfigError(
            "--adapter: with `lora: null` the weights themselves were trained, and there is no adapter; leave it out"
        )
    if dequantized and config.model.quantization is None:
        raise ConfigError("--base dequantized: the run has no model.quantization, so there is nothing to dequantize")
    transformers_logging.disable_progress_bar()
    with new_folder(to) as partial:
        chosen = choose_adapter(Path(config.run_dir), which)
        if full and (chosen / CONFIG_FILE).is_file():
            raise ConfigError(f"lora: null: {chosen} is an adapter; give the configuration that it was trained with")
        if is_adapter:
            _check_adapter(config, chosen)
        if config.weights == "full" and not is_adapter:
            said = f"{chosen}: {to}; {write_model(config, RunInputs(config), chosen, partial)}"
        elif AdapterFolder.read(chosen, "--checkpoint") and is_adapter:
            for name in (CONFIG_FILE, TENSORS_FILE):
                shutil.copyfile(chosen / name, partial / name)
            said = f"{chosen}: {to}"
        else:
            inputs = RunInputs(config)
            agreement = _merge(config, inputs, "cuda" if gpus else "cpu", chosen, partial, dequantized=dequantized)
            said = f"{chosen} merged into {inputs.model_folder}: {to}; {agreement}"
        kind: Kind = "full" if full else "adapter" if is_adapter else "merged"
        model_card(config, kind=kind).save(partial / "README.md")
    print_progress(f"slipstream export: {said}")
    if repository is not None:
        print_progress(f"slipstream export: uploaded to {upload(to, repository)}")
    return ExitCode.OK


def _check_adapter(config: RunConfig, chosen: Path) -> None:
    """Refuse to write the adapter alone where there is none, or it is of another base."""
    if (chosen / weight_patch.FILE).is_file():
        raise ConfigError(
            f"--adapter: the best policy was kept as it travelled, as a patch of the weights ({chosen}); leave --adapter out, or "
            "name a checkpoint"
        )
    if config.changes_base:
        raise ConfigError(
            f"--adapter: with lora.init_lora_weights={config.lora_section['init_lora_weights']} it is of a base from which PEFT "
            "took a part; leave --adapter out, and the model is written whole"
        )


def _merge(config: RunConfig, inputs: RunInputs, device: str, adapter: Path, to: Path, *, dequantized: bool) -> str:
    """Write the merged model. Returns how well it agrees, in words."""
    base = inputs.dequantized_model(device) if dequantized else inputs.model(device)
    vocab_size, generator = base.config.get_text_config().vocab_size, torch.Generator().manual_seed(config.seed)
    ids = torch.randint(vocab_size, (_ROWS, _LENGTH), generator=generator).to(device)
    with reading(f"--checkpoint: {adapter} does not fit model.path"):
        adapted = PeftModel.from_pretrained(base, adapter).eval()
    wanted = logprobs(adapted, ids)
    with adapted.disable_adapter():
        moved = float((wanted - logprobs(adapted, ids)).abs().max())
    merged = adapted.merge_and_unload(safe_merge=True)
    merged.save_pretrained(to)
    _write_files(inputs, to)
    del adapted, base, merged
    difference = float((wanted - logprobs(inputs.model(device, to), ids)).abs().max())
    check(difference, moved, TOLERANCES[config.model.dtype], config.model.dtype)
    return f"log-probs agree to {difference:.1e} (the adapter moves them by up to {moved:.2g})"


def write_model(config: RunConfig, inputs: RunInputs, policy: Path, to: Path) -> str:
    """Write the model that a run's own weights became, in the dtype of the run. Returns how it was compared, in words.

    Args:
        policy: a checkpoint, the final model or adapter, or the patch of the best one.
    """
    if (policy / weight_patch.FILE).is_file():
        model = patched(inputs.model("cpu"), inputs.model_folder, policy)
    elif (policy / CONFIG_FILE).is_file():
        model = merged(config, inputs, AdapterFolder.read(policy, "--checkpoint"))
    else:
        model = inputs.model("cpu", checked(policy, checkpoint_problems(policy), "--checkpoint"))
        restore_config(model.config, inputs.model_folder)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(to)
    _write_files(inputs, to)
    written = inputs.model("cpu", to).state_dict()
    if wrong := [name for name, tensor in state.items() if not torch.equal(written[name], tensor)]:
        raise ConfigError(f"{wrong[0]} differs when the written model is read back; nothing was written")
    return f"{len(state)} tensors were read back, bit for bit"


def merged(config: RunConfig, inputs: RunInputs, adapter: AdapterFolder) -> Any:
    """Return the base model with the weights that the trainer published of an adapter. Raises ConfigError if it does not fit."""
    model, lora = inputs.model("cpu"), build_lora(config)
    assert lora is not None
    policy = adapt(inputs.model("cpu"), lora)
    if config.changes_base:
        load_beginning(policy, adapter.path)
    adapter.load_into(policy)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for each in merged_weights(policy):
            parameters[each.name].copy_(each.now())
    return model


def patched(base: Any, base_folder: Path, policy: Path) -> Any:
    """Return the base model with the weights of a patch, in its dtype of 16 bits. Raises ConfigError if the patch is not of this
    base."""
    state = base.state_dict()
    try:
        patches = weight_patch.read(policy, None, {n: tuple(t.shape) for n, t in state.items()})
        for tensor, places, bits in composed(patches):
            flat = state[tensor.name].view(-1).view(torch.int16).numpy().view(np.uint16)
            flat[places] ^= bits
            if int(flat.sum(dtype=np.uint64)) != tensor.sum:
                raise ConfigError(
                    f"model.path: {base_folder} is not the model that {policy} is a patch of ({tensor.name})"
                )
    except BlobError as error:
        raise ConfigError(f"{policy} does not fit model.path: {error}") from error
    return base


def _write_files(inputs: RunInputs, to: Path) -> None:
    """Write what a model's folder has beside its weights."""
    inputs.tokenizer().save_pretrained(to)
    for name in _OF_IMAGES:
        if (file := inputs.model_folder / name).is_file():
            shutil.copyfile(file, to / name)


def check(difference: float, moved: float, tolerance: float, dtype: str) -> None:
    """`ConfigError` if the merged model is not what was trained: if the largest `difference` of a log-prob, in nats, from base
    model with adapter is too large, also beside what the adapter has `moved` of the base model."""
    if not difference <= tolerance:  # NaN is refused, too
        raise ConfigError(
            f"the merged model's log-probs differ by {difference:.2g} from those of base model and adapter, more than "
            f"{tolerance:g}; nothing was written. Is model.path the model that the adapter was trained on?"
        )
    if difference > max(_NOISE, _MOST_LOST * moved):
        raise ConfigError(
            f"rounding to {dtype} loses what the adapter changes (log-probs move by {moved:.2g}, and differ by {difference:.2g} "
            "after merging); nothing was written. Export with --set model.dtype=float32, or serve the adapter itself"
        )


def logprobs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The log-prob of each token but the first: (N, L - 1), float32."""
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(dim=-1).gather(2, ids[:, 1:, None])[..., 0]


def upload(folder: Path, repository: str) -> str:
    """Upload to the repository, which is made, private, if it does not exist, and returns its address; `ConfigError` if the
    hub refused, or cannot be reached."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        address = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="slipstream export")
    except Exception as error:
        raise ConfigError(
            f"--push-to-hub {repository}: {type(error).__name__}: {error}. The model is in {folder}"
        ) from error
    return str(address)
