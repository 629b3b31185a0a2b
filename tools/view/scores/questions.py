"""What the viewer asks its child process, and what that answers."""

from typing import Annotated

from msgspec import Meta, Struct

Text = Annotated[str, Meta(max_length=4096)]


class Policy(Struct, frozen=True):
    """A base model in a local folder, with an adapter, or (empty) without one. `quantization` is `model.quantization`, if any;
    `key` is another one for other weights in these folders."""

    base: Text
    dtype: Text
    quantization: Text
    adapter: Text
    key: Text = ""


class Question(Struct, frozen=True):
    """A group: int32 `prompt_ids` (P,), `completion_ids` (T,) and the `lengths` of its R records. `temperature` is the one that
    was sampled with."""

    prompt_ids: bytes
    completion_ids: bytes
    lengths: list[int]
    temperature: float


class Answer(Struct, frozen=True):
    """Float32 (T,) each; or why there are none."""

    logprobs: bytes = b""
    entropies: bytes = b""
    problem: str = ""
