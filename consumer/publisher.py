"""The trainable weights of this moment as an adapter blob.

Guarantee: the blob holds a plain PEFT adapter (what `save_pretrained` writes), copied to host memory, so training may go
on while it travels.
"""

import json
from typing import Any

from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save

from protocol.adapter_blob import AdapterBlob


def adapter_blob(model: PeftModel) -> AdapterBlob:
    """Copies the adapter named `default` out of `model`."""
    state = get_peft_model_state_dict(model, adapter_name="default")
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}
    settings = model.peft_config["default"].to_dict() | {"inference_mode": True}
    return AdapterBlob(
        config_json=json.dumps(settings, default=_plain, sort_keys=True).encode(), safetensors=save(tensors)
    )


def _plain(value: Any) -> Any:
    """PEFT keeps module names in sets and kinds in enums."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(getattr(value, "value", value))
