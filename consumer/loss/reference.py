"""The policy that the KL term is measured from: the base model, or the adapter that a run started from.

Guarantee: inside the context the model computes as its reference policy; afterwards as before, with the very same parameters.
"""

from types import TracebackType

import torch
from peft import PeftModel, get_peft_model_state_dict


class ReferencePolicy:
    """A context, for forward passes without a gradient.

    Args:
        model: whose adapter `default` is trained.
        tensors: of the adapter to compute with; None: without an adapter.
    """

    def __init__(self, model: PeftModel, tensors: dict[str, torch.Tensor] | None = None) -> None:
        self._model = model
        self._pairs: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        if tensors is not None:
            by_address = {parameter.data_ptr(): parameter for parameter in model.parameters()}
            for name, tensor in get_peft_model_state_dict(model, adapter_name="default").items():
                parameter = by_address[tensor.data_ptr()]
                self._pairs.append((parameter, tensors[name].to(parameter.device, parameter.dtype, copy=True)))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """That it keeps beside the model's."""
        return [tensor for _, tensor in self._pairs]

    def __enter__(self) -> None:
        if self._pairs:
            self._exchange()
        else:
            self._disabled = self._model.disable_adapter()
            self._disabled.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pairs:
            self._exchange()
        else:
            self._disabled.__exit__(kind, error, trace)

    def _exchange(self) -> None:
        """The parameters' storage and ours change places."""
        for number, (parameter, other) in enumerate(self._pairs):
            parameter.data, self._pairs[number] = other, (parameter, parameter.data)
