"""The way of rows through a model and to log-probs: chosen once, by a trial of the model where it computes.

Guarantee: all ranks take the same way, and one that passed its trial. A model whose rows depend on each other in every way is
refused. Rows are a tree, or each is padded. Log-probs are made by our head, by TRL's for experts whose load is balanced, or from
whole logits.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from trl.trainer.utils import add_fused_lm_head

from consumer.learn.forward import (
    Head,
    Layout,
    Tokens,
    check_teachable,
    logits_of,
    logprobs_by_trl,
    logprobs_of_whole_logits,
    rows_layout,
    token_logprobs,
    tree_layout,
)
from consumer.learn.loss import Pass
from consumer.learn.model import text_model
from consumer.learn.rotary import engine_length
from consumer.learn.shards import gathered
from consumer.learn.tree_attention import ChosenKernel, choose_kernel
from consumer.learn.trial import company_problem, head_problem
from consumer.ranks.exchange import Ranks
from protocol.config.run import RunConfig
from protocol.errors import ConfigError

logger = logging.getLogger(__name__)


class RowPasses:
    """The passes through one model.

    Args:
        base: the causal language model, with the layers of an adapter in it.
        options: the run's GRPOConfig.
        router_loss_coef: weight of the load-balancing loss of experts.
        autocast: makes the context of the passes.

    Attributes:
        kernel: of trees; None: rows are padded.
        logits: from which our head makes log-probs; None: it does not.
    """

    def __init__(
        self,
        base: Any,
        config: RunConfig,
        options: Any,
        router_loss_coef: float,
        ranks: Ranks,
        autocast: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._base, self._config, self._options, self._ranks = base, config, options, ranks
        self._has_experts, self._autocast = router_loss_coef != 0.0, autocast
        self.kernel: ChosenKernel | None = None
        self.logits = None if self._has_experts else logits_of(base)
        self._is_whole = self.logits is None and not self._has_experts
        self._is_chosen = False
        if self._has_experts:
            outputs = ("log_probs", "entropy")
            add_fused_lm_head(base, options.temperature, options.cast_lm_head_to_fp32, outputs)
        check_teachable(config.distillation, self.logits)

    def choose(self) -> None:
        """Try the model, the first time. All ranks call it.

        Raises:
            ConfigError: rows depend on each other, or the run needs logits that this model does not have.
        """
        if self._is_chosen:
            return
        self._is_chosen = True
        level = logging.INFO if self._ranks.rank == 0 else logging.DEBUG
        longest = engine_length(self._config, text_model(self._base).config)
        with self._autocast():  # as in every later pass; some kernels take no float32
            company = company_problem(self._base, longest)
            head = None if self._is_whole else head_problem(self._base, self._logprobs, self._options.temperature)
            if company is None and not self._has_experts:
                attention = self._options.model_init_kwargs.get("attn_implementation")
                self.kernel = choose_kernel(self._base, level, attention=attention, longest=longest)
        well = torch.tensor([company is None, head is None, self.kernel is not None])
        company_fits, head_fits, tree_fits = self._ranks.gather({"fits": well})["fits"].view(-1, 3).all(0).tolist()
        if not company_fits:
            raise ConfigError(
                f"model.path: {type(self._base).__name__} cannot be trained in company: {company or 'on another rank'}; a lower "
                "engine.max_model_len helps where positions depend on length, otherwise take another model"
            )
        if not tree_fits:
            self.kernel = None
        if not head_fits or self._is_whole:
            reason = head or "the LM head is no linear layer"
            logger.log(level, "log-probs are made from whole logits, which take memory: %s", reason)
            self.logits, self._is_whole, self.kernel = None, True, None
            check_teachable(self._config.distillation, None)

    def layout(self, tokens: Tokens) -> Layout:
        """Lay out rows."""
        return rows_layout(tokens) if self.kernel is None else tree_layout(tokens, self.kernel.make)

    def __call__(self, layout: Layout, *, entropy_trains: bool) -> Pass:
        """Return log-probs and entropies of a layout on the device, in the context of `autocast`."""
        base = self._base
        if self._is_whole:
            given = (base, layout, self._options.temperature)
            return Pass(*gathered(base, lambda: logprobs_of_whole_logits(*given, has_experts=self._has_experts)))
        if self._has_experts:
            return Pass(*gathered(base, lambda: logprobs_by_trl(base, layout)))
        assert self.logits is not None
        head = Head(self.logits, self._options, entropy_trains=entropy_trains)
        return Pass(*gathered(base, lambda: token_logprobs(base, layout, head)))

    def _logprobs(self, layout: Layout) -> torch.Tensor:
        return self(layout, entropy_trains=False).logprobs
