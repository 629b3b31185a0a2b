"""Model, tokenizer and prompts of a run, for the tools that load them without a daemon.

Guarantee: they are those of the daemons: of the same revision, in the same dtype, with the same rows.
"""

from pathlib import Path
from typing import Any

from consumer.prompts.dataset import PromptDataset
from consumer.prompts.generated import with_rows
from consumer.prompts.tokenizer import load_tokenizer
from producer.rollouts.prompts import PromptFormat
from protocol.config.run import RunConfig
from protocol.errors import DatasetError
from protocol.library_errors import reading
from protocol.wire.model_folder import vocabulary_size
from protocol.wire.model_source import resolve_model


class RunInputs:
    """Load what a tool asks for, each time anew; `ConfigError` if there is no such model, or it cannot be loaded."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._trusted = config.model.trust_remote_code
        self.model_folder = resolve_model(config.model.path, config.model.revision, trust_remote_code=self._trusted)

    def tokenizer(self) -> Any:
        return load_tokenizer(self.model_folder, trust_remote_code=self._trusted)

    def prompt_format(self) -> PromptFormat:
        """Return what makes tokens of prompts, as in a producer."""
        from transformers import AutoConfig

        longest = self._config.engine.get("max_model_len")
        if longest is None:
            loaded = AutoConfig.from_pretrained(self.model_folder, trust_remote_code=self._trusted)
            longest = loaded.get_text_config().max_position_embeddings
        template, size = self._config.dataset.chat_template_kwargs, vocabulary_size(self.model_folder)
        return PromptFormat(self.tokenizer(), longest, template, vocab_size=size)

    def end_ids(self) -> set[int]:
        """Return the tokens that end a completion: those of tokenizer and model, and of `sampling`."""
        from transformers import AutoConfig, GenerationConfig

        sampling = self._config.sampling
        if sampling.ignore_eos:
            return set(sampling.stop_token_ids)
        try:
            generation = GenerationConfig.from_pretrained(self.model_folder)
        except OSError:  # the model has no such file
            loaded = AutoConfig.from_pretrained(self.model_folder, trust_remote_code=self._trusted)
            generation = GenerationConfig.from_model_config(loaded)
        given = generation.eos_token_id
        ends = [self.tokenizer().eos_token_id, *(given if isinstance(given, list) else [given])]
        return {end for end in ends if end is not None} | set(sampling.stop_token_ids)

    def model(self, device: str, folder: Path | None = None) -> Any:
        """The base model, or the one in `folder`, ready to compute log-probs."""
        import torch

        from consumer.learn.model import load_model

        dtype = getattr(torch, self._config.model.dtype)
        options = {"dtype": dtype, "trust_remote_code": self._trusted}
        with reading(f"model.path: {folder or self.model_folder} cannot be loaded"):
            return load_model(folder or self.model_folder, **options).to(device).eval()

    def dequantized_model(self, device: str) -> Any:
        """The base model as the trainer computes with it: quantized, in the dtype of the run."""
        import torch

        from consumer.learn.model import load_model, quantization_config

        dtype, quantization = getattr(torch, self._config.model.dtype), quantization_config(self._config.model)
        options = {"dtype": dtype, "trust_remote_code": self._trusted, "quantization_config": quantization}
        with reading(f"model.path: {self.model_folder} cannot be quantized"):
            model = load_model(self.model_folder, device_map=device, **options)
            return model.dequantize().to(dtype).eval()

    def prompts(self) -> PromptDataset:
        """The prompts of the run's dataset; `DatasetError` if it has none, or they cannot be read."""
        if self._config.environment.atropos:
            raise DatasetError(
                "dataset: with environment.agent=atropos there is none, environments have their own items"
            )
        return PromptDataset(
            with_rows(self._config).dataset,
            self.model_folder,
            trust_remote_code=self._trusted,
            environments=self._config.routes,
        )
