"""`slipstream cluster`: a run on many machines under Ray.

Guarantee: It starts the commands that people start by hand; data never travels over Ray. Only this room knows Ray.

"""

MOST_PRODUCERS = 4096
