"""Small random models of several families, built locally, and random adapters for them.

Guarantee: equal arguments give equal files, so digests agree between processes and runs. Weights are drawn wider than
transformers does, so that distributions are far from uniform and a wrong adapter shows.
"""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging as transformers_logging

from consumer.learn.model import load_model, within_text_model
from protocol.wire import weight_patch
from protocol.wire.adapter_blob import AdapterBlob, pack
from tests.weight_patches import patch_between

transformers_logging.disable_progress_bar()

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_CHARACTERS = "0123456789+-*/= abcdefghijklmnopqrstuvwxyz.,?!"
_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}


def char_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *_CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def byte_bpe_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on a few sentences, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = ["What is the sum of two and three?", "The sum is five.", "Wie heißt du? 你好, 世界! 🙂"] * 20
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|end|>", chat_template=CHAT_TEMPLATE
    )


def build_model(family: str, folder: Path, seed: int = 0, num_layers: int = 2) -> Path:
    """Writes a model of `family`, one of the cases below, with its tokenizer to `folder`, in float32."""
    tokenizer = byte_bpe_tokenizer() if family == "llama" else char_tokenizer()
    settings = _SHAPE | {
        "num_hidden_layers": num_layers,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    torch.manual_seed(seed)
    embedding_std = 0.06 if family == "gemma3" else 0.5  # Gemma multiplies embeddings by sqrt(hidden_size)
    match family:
        case "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**settings, bos_token_id=None, tie_word_embeddings=True))
        case "llama":
            model = LlamaForCausalLM(LlamaConfig(**settings, bos_token_id=None, tie_word_embeddings=False))
        case "gemma3":
            model = Gemma3ForCausalLM(
                Gemma3TextConfig(
                    **settings, bos_token_id=None, head_dim=32, sliding_window=64, query_pre_attn_scalar=32
                )
            )
        case "phi3":  # its frequencies depend on length
            factors = {"short_factor": [1.0] * 16, "long_factor": [float(number) for number in range(1, 17)]}
            longrope = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 64}
            model = Phi3ForCausalLM(
                Phi3Config(
                    **settings,
                    bos_token_id=None,
                    original_max_position_embeddings=64,
                    rope_parameters=longrope | factors,
                )
            )
        case "mixtral":
            model = MixtralForCausalLM(MixtralConfig(**settings, bos_token_id=None, num_local_experts=4))
        case "qwen3_moe":
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings, **experts, bos_token_id=None))
        case _:
            raise ValueError(family)
    return save_random(model, tokenizer, folder, embedding_std)


def save_random(model: Any, tokenizer: Any, folder: Path, embedding_std: float) -> Path:
    """Weights that are large enough for a change of any of them to show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, embedding_std if "embed" in name else 0.15)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


_OWN_FILES = {
    "configuration_own.py": """
from transformers import Qwen2Config

class OwnConfig(Qwen2Config):
    model_type = "own"
""",
    "modeling_own.py": """
from transformers import Qwen2ForCausalLM, Qwen2Model
from .configuration_own import OwnConfig

class OwnModel(Qwen2Model):
    config_class = OwnConfig

class OwnForCausalLM(Qwen2ForCausalLM):
    config_class = OwnConfig
""",
    "tokenization_own.py": """
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
""",
}


def build_model_with_code(folder: Path) -> Path:
    """As `build_model("qwen2", folder)`, but configuration, model and tokenizer are classes that come with the folder."""
    build_model("qwen2", folder, num_layers=1)
    for name, source in _OWN_FILES.items():
        (folder / name).write_text(source)
    classes = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModel": "modeling_own.OwnModel",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    _change_json(folder / "config.json", model_type="own", architectures=["OwnForCausalLM"], auto_map=classes)
    tokenizers = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    _change_json(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=tokenizers)
    return folder


def _change_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _written(folder: Path | None) -> tuple[int, ...]:
    """When the weights in there were written."""
    return tuple(file.stat().st_mtime_ns for file in sorted(folder.glob("*.safetensors"))) if folder else ()


@functools.lru_cache(maxsize=8)
def _loaded(
    model_folder: Path, adapter_folder: Path | None, written: tuple[int, ...], adapter_written: tuple[int, ...]
) -> torch.nn.Module:
    model = load_model(model_folder, dtype=torch.float32)
    return model if adapter_folder is None else PeftModel.from_pretrained(model, adapter_folder)


def random_adapter(
    model_folder: Path, folder: Path, *, rank: int = 8, seed: int = 0, targets: str | list[str] = "all-linear"
) -> tuple[bytes, str]:
    """Writes a LoRA adapter whose matrices are all non-zero to `folder`; returns it as blob and sha256."""
    torch.manual_seed(seed)
    base = load_model(model_folder, dtype=torch.float32)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(base, within_text_model(config, base))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    return pack(
        AdapterBlob((folder / "adapter_config.json").read_bytes(), (folder / "adapter_model.safetensors").read_bytes())
    )


def random_patch(model_folder: Path, folder: Path, *, seed: int = 0) -> tuple[bytes, str]:
    """Writes the model with another 2 % of its elements to `folder`, in bfloat16; returns the patch as blob and sha256."""
    generator = torch.Generator().manual_seed(seed)
    shutil.copytree(model_folder, folder)
    model = load_model(model_folder, dtype=torch.bfloat16)
    parameters = dict(model.named_parameters())
    old = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with torch.no_grad():
        for parameter in parameters.values():
            chosen = torch.rand(parameter.shape, generator=generator) < 0.02
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.copy_(torch.where(chosen, noise, parameter))
    model.save_pretrained(folder)
    return weight_patch.pack(patch_between(old, parameters))


def reference_logprobs(
    model_folder: Path,
    adapter_folder: Path | None,
    prompt_ids: list[int],
    completion_ids: list[int],
    temperature: float,
) -> torch.Tensor:
    """Log-probs of the completion's tokens under transformers + PEFT, loaded from disk."""
    whole = reference_distributions(model_folder, adapter_folder, prompt_ids, completion_ids, temperature)
    return whole.gather(1, torch.tensor(completion_ids)[:, None])[:, 0]


def reference_distributions(
    model_folder: Path,
    adapter_folder: Path | None,
    prompt_ids: list[int],
    completion_ids: list[int],
    temperature: float = 1.0,
) -> torch.Tensor:
    """Log-probs of the whole vocabulary in the place of each of the completion's tokens, as `reference_logprobs`."""
    model = _loaded(model_folder, adapter_folder, _written(model_folder), _written(adapter_folder))
    ids = torch.tensor([prompt_ids + completion_ids])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)
