"""Several processes that train one policy, each on its own GPU or on a share of the CPU's cores.

Guarantee: rank 0 is the trainer that users know; the others hold model and optimizer only, follow its plan, and never
outlive it. Every collective operation is taken by all ranks or by none. The rooms `learn` and `app` may enter.
"""
