"""vLLM as GPU users get it, rehearsed on a CPU: its configuration, its Model Runner V2, its GPU worker.

Guarantee: what of vLLM's private names is replaced for it is replaced in `cuda_platform` and `worker` and nowhere else. Each kind
of check has a process of its own, because none of it can be taken back.
"""
