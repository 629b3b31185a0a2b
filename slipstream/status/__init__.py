"""`slipstream status` shows what a run does in one screen.

Guarantee: It shows the numbers of the daemons and of the run's files, and names those that it cannot read. Its command line and
`slipstream_extras/view` enter.
"""
