"""`slipstream status`: what a run does, in one screen.

Guarantee: It shows what the daemons and the run's files say, and says so where it cannot read them. Its command line and
`slipstream/view` enter.
"""
