"""`rl-trainer` that kills itself where `TRAINER_DIES_AT` says, one of the points of `tests.chaos.aims`. All else is real."""

import os

from consumer import cli
from tests.chaos.aims import Aim
from tests.chaos.trainer_child import set_points

if __name__ == "__main__":
    set_points(Aim(os.environ["TRAINER_DIES_AT"]))
    cli.main()
