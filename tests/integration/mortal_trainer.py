"""`rl-trainer` that kills itself where `TRAINER_DIES_AT` says, one of the points of `campaigns.chaos.aims`. All else is real."""

import os

from campaigns.chaos.aims import Aim
from campaigns.chaos.trainer_child import set_points
from consumer.app import cli

if __name__ == "__main__":
    set_points(Aim(os.environ["TRAINER_DIES_AT"]))
    cli.main()
