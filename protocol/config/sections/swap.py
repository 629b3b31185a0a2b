"""The section `swap`: how a producer takes a new policy, and how the swap is verified."""

from typing import Literal

from pydantic import Field

from protocol.config.sections.section import Count, PositiveFloat, Problems, Section

TOLERANCES = {"float32": 2e-3, "float16": 0.2, "bfloat16": 1.0}
"""Largest difference of a log-prob, in nats, between two right computations of one policy, by `model.dtype`. Right swaps showed
up to 1.6e-5, 0.027 and 0.35 on the CPU."""


class SwapSection(Section):
    mode: Literal["adapter", "merged"] = Field(
        "adapter",
        description="`adapter`: vLLM serves each policy as a LoRA beside its base weights. `merged`: the engine's own weights "
        "become those of the policy, between two decode steps, so that decoding pays nothing for the LoRA.",
    )
    in_flight: Literal["finish", "continue", "restart"] | None = Field(
        None,
        description="Requests that are being generated when a policy arrives: `finish` on their own, `continue` from their "
        "tokens under the new one, or `restart` from the prompt. Default: `finish`, and `continue` with `mode: merged`, where "
        "the old weights are gone.",
    )
    probe_every: Count = Field(
        1,
        description="Every so many versions the engine's log-probs of a fixed probe are compared with the trainer's before the "
        "version is served. 0: never.",
    )
    probe_tolerance: PositiveFloat | None = Field(
        None,
        description="Largest difference of a log-prob of the probe between trainer and engine. Default: by `model.dtype`; "
        "with `engine.quantization` there is none.",
    )

    def problems(self) -> Problems:
        if self.mode == "merged" and self.in_flight == "finish":
            old = "in_flight: finish needs the old weights, which mode: merged has replaced"
            yield f"{old}; use continue or restart, or mode: adapter"

    @property
    def on_swap(self) -> Literal["finish", "continue", "restart"]:
        return self.in_flight or ("continue" if self.mode == "merged" else "finish")

    @property
    def spans_versions(self) -> bool:
        """Whether tokens of one completion may come from several policies."""
        return self.on_swap == "continue"
