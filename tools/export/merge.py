"""`rl-export` merges an adapter into its base model and writes a folder that needs no PEFT.

Guarantee: the folder appears whole and on the disk, and only if the model in it, when it is read back, computes what base model
and adapter compute together; nothing leaves the machine unless a repository is named.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers.utils import logging as transformers_logging

from consumer.checkpoints.adapter_folder import AdapterFolder
from protocol.config.run import RunConfig
from protocol.config.sections.swap import TOLERANCES
from protocol.errors import ConfigError, ExitCode
from protocol.files.staged import staged
from tools.export.adapter_choice import choose_adapter
from tools.run_inputs import RunInputs

_ROWS, _LENGTH = 4, 32
_MOST_LOST = 0.5  # the largest share of the adapter's change that rounding may lose
_NOISE = 1e-4  # nats; a difference below this is no loss


def run(config: RunConfig, gpus: list[int], *, which: str, to: Path, repository: str | None) -> ExitCode:
    """
    Args:
        which: `last`, `best`, the step of a checkpoint, or a folder.
        to: the folder to write.
        repository: the hub's repository to upload it to, or None.

    Raises:
        ConfigError: no such adapter, the folder exists, or the merged model is not what was trained.
    """
    if to.exists():
        raise ConfigError(f"--to: {to} exists already; remove it, or choose another folder")
    transformers_logging.disable_progress_bar()
    chosen = choose_adapter(config, which)
    AdapterFolder.read(chosen, "--checkpoint")
    inputs = RunInputs(config)
    with staged(to) as partial:
        said = _merge(config, inputs, "cuda" if gpus else "cpu", chosen, partial)
    sys.stdout.write(f"rl-export: {chosen} merged into {inputs.model_folder}: {to}; {said}\n")
    if repository is not None:
        sys.stdout.write(f"rl-export: uploaded to {upload(to, repository)}\n")
    return ExitCode.OK


def _merge(config: RunConfig, inputs: RunInputs, device: str, adapter: Path, to: Path) -> str:
    """Writes the merged model. Returns how well it agrees, in words."""
    base = inputs.model(device)
    ids = _token_ids(base.config.get_text_config().vocab_size, config.seed).to(device)
    adapted = PeftModel.from_pretrained(base, adapter).eval()
    wanted = logprobs(adapted, ids)
    with adapted.disable_adapter():
        moved = float((wanted - logprobs(adapted, ids)).abs().max())
    merged = adapted.merge_and_unload(safe_merge=True)
    merged.save_pretrained(to)
    inputs.tokenizer().save_pretrained(to)
    del adapted, base, merged
    difference = float((wanted - logprobs(inputs.model(device, to), ids)).abs().max())
    check(difference, moved, TOLERANCES[config.model.dtype], config.model.dtype)
    return f"log-probs agree to {difference:.1e} (the adapter moves them by up to {moved:.2g})"


def check(difference: float, moved: float, tolerance: float, dtype: str) -> None:
    """
    Args:
        difference: the largest difference of a log-prob between the merged model and base model with adapter, in nats.
        moved: the largest difference between the base model with and without the adapter.

    Raises:
        ConfigError: the merged model is not what was trained.
    """
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
    """Uploads to the repository, which is made, private, if it does not exist. Returns its address.

    Raises:
        ConfigError: the hub refused, or cannot be reached.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        address = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="rl-export")
    except Exception as error:
        raise ConfigError(
            f"--push-to-hub {repository}: {type(error).__name__}: {error}. The model is in {folder}"
        ) from error
    return str(address)


def _token_ids(vocab_size: int, seed: int) -> torch.Tensor:
    return torch.randint(vocab_size, (_ROWS, _LENGTH), generator=torch.Generator().manual_seed(seed))
