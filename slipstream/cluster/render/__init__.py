"""Files with which SLURM, Kubernetes, or ssh and systemd start a run on many machines.

Guarantee: `rl-cluster render` starts nothing and changes nothing that is there. The files are for people: they hold what a person
would type, and may be changed. The command enters through `command`.
"""
