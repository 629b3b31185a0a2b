"""Several processes that train one policy, each on its own GPU or on a share of the CPU's cores.

Guarantee: rank 0 is the trainer that everybody knows; the others hold model and optimizer only, do what its plan says, and never
outlive it. Every collective operation is taken by all ranks or by none. The training room, assembly and daemon may enter.
"""
