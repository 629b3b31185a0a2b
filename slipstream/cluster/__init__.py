"""`slipstream cluster`: a run on many machines, which Ray or another scheduler places.

Guarantee: What it starts are the commands that people start by hand; data never travels over the scheduler. Only this room
knows Ray. It stands above the other tools, of which it uses `status` and `keys`.
"""

MOST_PRODUCERS = 4096
