"""`slipstream cluster`: a run on many machines under Ray.

Guarantee: It starts the commands that people start by hand; data never travels over Ray. Only this room
knows Ray. It stands above the other subcommands, and uses `status` and `journal`.
"""

MOST_PRODUCERS = 4096
