"""Environments by their configuration."""

from types import SimpleNamespace

from verifiers.v1.tasksets import doubling


def resolve_env_config(values):
    taskset = SimpleNamespace(**(doubling.DEFAULTS | values["taskset"]))
    if unknown := vars(taskset).keys() - doubling.DEFAULTS.keys() - {"id"}:
        raise ValueError(f"taskset: unknown keys {sorted(unknown)}")
    none = SimpleNamespace(retries=SimpleNamespace(max_retries=0, rules=[]))
    return SimpleNamespace(taskset=taskset, agent=none, retries=none.retries)


def load_environment(config):
    return doubling.Doubling(config)
