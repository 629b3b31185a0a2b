"""Sections `model` and `sampling`: what is trained, and how its completions are drawn."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from protocol.config.sections.section import Count, Problems, Section, Share
from protocol.wire.messages import Sampling

StopText = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def is_local(model: str, folder: Path) -> bool:
    """Whether the name of a model is that of a folder, there or not, and none of the hub. Relative ones begin in `folder`."""
    return model.startswith((".", "~", "/")) or (folder / model).is_dir()


class ModelSection(Section):
    path: str = Field(
        description="Base model: a local folder or a hub name, in transformers format. Of a vision-language checkpoint the text "
        "model is trained; see docs/operations.md."
    )
    revision: str | None = Field(None, description="Hub revision (branch, tag or commit).")
    trust_remote_code: bool = Field(
        False,
        description="Run the Python files that come with the model, where its classes or its tokenizer are not part of "
        "transformers. Both daemons do, as the user that runs them; see docs/security.md.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16",
        description="Dtype of the base weights, in the engine and in the trainer. LoRA weights train in fp32. On a GPU "
        "`swap.mode: adapter` needs 16 bits.",
    )
    quantization: Literal["nf4", "int8"] | None = Field(
        None,
        description="Format in which the trainer keeps the frozen base on its device (bitsandbytes): 4 or 8 bits per weight of "
        "every linear layer. The engine's is engine.quantization. Swaps are proved with the base in model.dtype, in host memory.",
    )


class SamplingSection(Section):
    num_generations: Annotated[int, Field(ge=2, le=4096)] = Field(8, description="Completions per prompt (the group).")
    max_completion_length: Annotated[int, Field(ge=1, le=2**24)] = Field(
        256, description="Longest completion, in tokens."
    )
    temperature: Annotated[float, Field(gt=0, le=100)] = Field(1.0, description="Applied on both sides.")
    top_p: Share = Field(1.0, description="Nucleus sampling; see accept_biased_ratios.")
    top_k: Count = Field(0, description="Top-k sampling, 0 is off; see accept_biased_ratios.")
    min_p: Annotated[float, Field(ge=0, le=1)] = Field(0.0, description="Min-p sampling; see accept_biased_ratios.")
    stop: Annotated[list[StopText], Field(max_length=16)] = Field(
        [],
        description="Texts that end a completion. It keeps the text, and rewards and trainer see it: its tokens were sampled.",
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] = Field(
        [], description="Tokens that end a completion, beside those of the model. It keeps them."
    )
    ignore_eos: bool = Field(
        False, description="Go on after the model's own end of a text, until something else ends the completion."
    )
    regex: Annotated[str, Field(min_length=1, max_length=65_536)] | None = Field(
        None, description="Guided decoding: only what the expression matches is sampled; see accept_biased_ratios."
    )
    json_schema: dict[str, Any] | None = Field(
        None, description="Guided decoding: only JSON of this JSON schema is sampled; see accept_biased_ratios."
    )
    accept_biased_ratios: bool = Field(
        False,
        description="Accept top_p, top_k, min_p or guided decoding (regex, json_schema) although the trainer cannot reproduce "
        "their renormalized distribution, which biases every importance ratio.",
    )

    def problems(self) -> Problems:
        if self.regex is not None and self.json_schema is not None:
            yield "regex and json_schema exclude each other; remove one"
        off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "regex": None, "json_schema": None}
        changed = [f"{key}={getattr(self, key)}" for key in off if getattr(self, key) != off[key]]
        if changed and not self.accept_biased_ratios:
            yield (
                f"{', '.join(changed)} changes the sampling distribution in a way the trainer does not reproduce, so "
                "importance ratios would be biased. Remove it, or set sampling.accept_biased_ratios=true"
            )

    @property
    def message(self) -> Sampling:
        """As leases say it."""
        values = {name: getattr(self, name) for name in Sampling.__struct_fields__}
        values |= {"stop": tuple(self.stop), "stop_token_ids": tuple(self.stop_token_ids)}
        schema = "" if self.json_schema is None else json.dumps(self.json_schema)
        return Sampling(**values | {"regex": self.regex or "", "json_schema": schema})
