"""What `tests.chaos.zygote` imports and runs for `rl-trainer` and `rl-sft`."""

from tests.chaos import trainer_child
from tests.integration import warm

preload = trainer_child.preload
main = warm.run
