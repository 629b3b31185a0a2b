"""Log-probs and entropies of tokens from hidden states, through a linear LM head whose weights do not train.

Guarantee: logits exist for one tile of tokens at a time, in the forward pass only. The gradient of a token's log-prob (and
entropy) with respect to its hidden state does not depend on the loss, so it is made while the tile is there, and what comes
back in the backward pass merely scales it. TRL's kernel projects each tile a second time there, which makes three matrix
products of two.

With logits z = (W h + bias) / temperature, p = softmax(z) and H = -Σ p log p:

    d log p_y / dh = (W_y - Σ_v p_v W_v) / temperature        dH / dh = -Σ_v p_v (log p_v + H) W_v / temperature
"""

from typing import Any

import torch

_TILE_ELEMENTS = 2**23  # of float32 logits: 32 MiB, and as much again for what is made of them
_MIN_TILE_TOKENS = 128  # fewer would read the weights more often than they are worth


class TokenLogprobs(torch.autograd.Function):  # type: ignore[misc]
    """(N,) log-probs and entropies of `targets` (N,), given hidden states (N, H) and weights (V, H).

    They are computed in the wider of float32 and what is given.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        entropy_trains: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        trains = ctx.needs_input_grad[0]
        slopes = torch.empty_like(hidden) if trains else None
        entropy_slopes = torch.empty_like(hidden) if trains and entropy_trains else None
        tile = max(_MIN_TILE_TOKENS, _TILE_ELEMENTS // len(weight))
        for start in range(0, len(hidden), tile):
            part = slice(start, start + tile)
            z = torch.nn.functional.linear(hidden[part], weight, bias).to(dtype).div_(temperature)
            z -= z.logsumexp(-1, keepdim=True)  # log p
            logprobs[part] = z.gather(1, targets[part, None])[:, 0]
            p = z.exp()
            entropies[part] = -torch.einsum("nv,nv->n", p, z)
            if slopes is not None:
                expected = p.to(weight.dtype) @ weight
                slopes[part] = (weight[targets[part]] - expected) / temperature
            if entropy_slopes is not None:
                z += entropies[part, None]
                entropy_slopes[part] = (p.mul_(z).to(weight.dtype) @ weight) / -temperature
        ctx.save_for_backward(slopes, entropy_slopes)
        if not entropy_trains:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, logprob_gradient: torch.Tensor, entropy_gradient: torch.Tensor) -> tuple[Any, ...]:
        slopes, entropy_slopes = ctx.saved_tensors
        gradient = logprob_gradient[:, None].to(slopes.dtype) * slopes
        if entropy_slopes is not None:
            gradient += entropy_gradient[:, None].to(slopes.dtype) * entropy_slopes
        return gradient, None, None, None, None, None
