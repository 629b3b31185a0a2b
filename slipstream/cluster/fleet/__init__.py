"""What runs in the Ray cluster: one manager per run, and an actor for each command.

Guarantee: An actor starts, watches and stops a command, and carries nothing else. Decisions (what fits, which command, whether
it starts again, how many producers) are pure functions. The subcommands of `slipstream cluster` enter.
"""
