"""Slipstream from Python, and the command `slipstream`, which people run beside the daemons.

    run = slipstream.train(slipstream.load_config("run.yaml"), rewards=[correct])
    run.steps().plot(x="step", y="reward")

Guarantee: the import takes no heavy library. A command reads what a run left, or asks a daemon as any client
would; none but `run` and `cluster` changes a run that is going on. The rooms do not import each other; the modules below them are
what they share.
"""

from slipstream.run_data import Run
from slipstream.training import RunFailedError, load_config, train

__all__ = ["Run", "RunFailedError", "load_config", "train"]
