"""The trainer: intake of rollout groups, batches, GRPO steps with TRL, publishing of every new adapter, checkpoints."""
