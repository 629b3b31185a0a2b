"""The bundle of a run: the configuration and the files that its producers get.

Guarantee: a bundle has only keys that a producer reads, so nothing else leaves the trainer's host, and nothing else makes
producers start again when it changes. Values that name a place on that host stay there, and the bundle lists their keys: each
host gives its own. A configuration that holds a secret has no bundle, and the reason says where the secret belongs.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml

from protocol.config.functions import ENVIRONMENT_PLUGINS
from protocol.config.operation import LOOPBACK_HOSTS
from protocol.config.places import is_local
from protocol.config.rewards import ATROPOS_ITEMS, REWARD_PLUGINS, EnvironmentSection
from protocol.config.run import RunConfig
from protocol.errors import BundleError
from slipstream_extras.bundle.bundle import CONFIG_FILE, Bundle, BundledFile, encode, requirements
from slipstream_extras.bundle.sources import RunSources

ALL = None
SHARED: dict[str, tuple[str, ...] | None] = {
    "model": ("path", "revision", "trust_remote_code", "dtype", "quantization"),
    "dataset": ("chat_template_kwargs",),
    "rewards": ALL,
    "environment": ALL,
    "environments": ALL,
    "sampling": ALL,
    "pipeline": ("groups_per_step", "max_staleness", "stall_timeout_s", "gpu_handover_s"),
    "swap": ALL,
    "serve": ALL,
    "transport": (
        "heartbeat_interval_s",
        "heartbeat_timeout_s",
        "max_message_bytes",
        "blob_chunk_bytes",
        "max_unacked_bytes",
        "relay_port",
    ),
    "observability": (
        "log_level",
        "log_format",
        "metrics_host",
        "producer_metrics_port",
        "unresponsive_after_s",
    ),
    "evaluation": ("hold_swap_s",),
    "lora": ("r", "target_modules"),
    "engine": ALL,
    "engine_server": ALL,
    "teachers": ALL,
    "distillation": ("mode", "alone", "teacher_column", "top_k"),
}
"""The keys by section, beside `seed`. None: all of them."""

_UNREAD = "of-the-trainer"
"""A dataset that producers do not read."""
_SECRET = re.compile(
    r"(^|_)(token|secrets?|password|passwd|pwd|credentials?|auth|authorization|bearer|cookie|(api|access|private|secret)_?keys?)$"
)
_SECRET_VALUE = re.compile(r"(bearer|basic|token) \S{8,}$|(sk|hf|ghp|xoxb)[-_]\S{16,}$", re.IGNORECASE)
_NEW_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])|[- .]")
_ANY_HOST = (*LOOPBACK_HOSTS, "0.0.0.0", "::")  # noqa: S104  compared with, not bound to


@dataclass
class SharedConfig:
    """`values` as in a configuration file; `host_keys` as `--set` names them."""

    values: dict[str, Any]
    host_keys: list[str] = field(default_factory=list)

    def keep(self, section: Any, key: str, place: str) -> None:
        """The value stays on its host."""
        del section[key]
        self.host_keys.append(place)


def share(config: RunConfig, sources: RunSources) -> SharedConfig:
    """Add what the functions of the configuration need to `sources`. Raises BundleError with every reason against a bundle."""
    given = config.model_dump(mode="json", exclude_unset=True)
    shared = SharedConfig(_selected(given))
    problems = [*_secrets(shared.values)]
    if problems:
        raise BundleError("\n".join(problems))
    _keep_places(shared)
    _name_functions(shared.values, sources)
    return shared


def _selected(given: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {"run_dir": "run"}
    if "seed" in given:
        values["seed"] = given["seed"]
    if given.get("lora", {}) is None:  # the weights themselves train
        values["lora"] = None
    for name, keys in SHARED.items():
        section = given.get(name)
        if isinstance(section, list):
            values[name] = section
        elif section:
            values[name] = {key: value for key, value in section.items() if keys is ALL or key in keys}
    values.get("engine", {}).pop("hf_token", None)  # each host logs in to the hub by itself
    if given.get("environment", {}).get("agent") == "atropos":
        values["trainer"] = {"max_steps": given["trainer"]["max_steps"]}
    rows = {"path": ATROPOS_ITEMS if "trainer" in values else _UNREAD}
    values["dataset"] = rows | values.get("dataset", {})
    if "evaluation" in values:
        values["evaluation"]["dataset"] = {"path": _UNREAD}
    return values


def _secrets(values: dict[str, Any]) -> Iterator[str]:
    """Beside those that no key of ours can hold, because it names a file or an environment variable instead."""
    free = {"engine": values.get("engine", {})}
    free |= {f"{place}.options": section.get("options", {}) for place, section in _environments(values)}
    for number, one in enumerate(_functions(values)):
        if one.get("function"):
            free[f"rewards.functions.{number}.options"] = one.get("options", {})
    for place, section in free.items():
        for key in _secret_keys(section, place):
            yield f"{key} looks like a secret, and those are not sent to producers; give it in the environment of each"
    urls = {f"rewards.functions.{n}.url": one.get("url") for n, one in enumerate(_functions(values))}
    for key, url in urls.items():
        if url and _has_secret(url):
            yield f"{key} holds a secret, and those are not sent to producers; a reward service gets it by options.headers_env"


def _secret_keys(value: Any, place: str, *, is_secret: bool = False) -> Iterator[str]:
    """Yield the keys whose values are secrets. `is_secret`: whether the key of this value is one."""
    match value:
        case dict():
            for key, inner in value.items():
                yield from _secret_keys(inner, f"{place}.{key}", is_secret=_names_a_secret(str(key)))
        case list() | tuple():
            for number, inner in enumerate(value):
                yield from _secret_keys(inner, f"{place}.{number}", is_secret=is_secret)
        case str() if value and (is_secret or _SECRET_VALUE.match(value) or _has_secret(value)):
            yield place


def _names_a_secret(key: str) -> bool:
    """Return whether a key does, in whatever way its words are joined: api_key, apiKey, X-Api-Key."""
    return bool(_SECRET.search(_NEW_WORD.sub("_", key).lower()))


def _has_secret(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.password) or any(_names_a_secret(name) for name, _ in parse_qsl(parts.query))
    except ValueError:
        return False


def _keep_places(shared: SharedConfig) -> None:
    values = shared.values
    model, serve = values["model"], values.get("serve", {})
    if is_local(model["path"], Path()):
        shared.keep(model, "path", "model.path")
    for number, function in enumerate(_functions(values)):
        options = function.get("options", {})
        for section, place in ((function, ""), (options, ".options")):
            if isinstance(model := section.get("model"), str) and is_local(model, Path()):
                shared.keep(section, "model", f"rewards.functions.{number}{place}.model")
        if "/" in options.get("python", ""):
            shared.keep(options, "python", f"rewards.functions.{number}.options.python")
    environments = {f"{place}.options": section.get("options", {}) for place, section in _environments(values)}
    for place, options in environments.items():
        if "/" in (options.get("python") or ""):
            shared.keep(options, "python", f"{place}.python")
    if serve.get("api_key_file"):
        shared.keep(serve, "api_key_file", "serve.api_key_file")
    server = values.get("engine_server") or {}
    for key in [key for key in ("adapter_dir", "key_file", "ca_file") if server.get(key)]:
        shared.keep(server, key, f"engine_server.{key}")
    for number, teacher in enumerate(values.get("teachers", [])):
        for key in [key for key in ("key_file", "ca_file") if teacher.get(key)]:
            shared.keep(teacher, key, f"teachers.{number}.{key}")
    for name, key in (("serve", "host"), ("observability", "metrics_host")):
        section = values.get(name, {})
        if section.get(key, _ANY_HOST[0]) not in _ANY_HOST:
            shared.keep(section, key, f"{name}.{key}")
    for place, section in (
        ("engine", values.get("engine", {})),
        *(
            (f"{place}.arguments", given)
            for place, options in environments.items()
            if isinstance(given := options.get("arguments"), dict)
        ),
        *environments.items(),
    ):
        for key in [key for key, value in section.items() if _names_a_place(value)]:
            shared.keep(section, key, f"{place}.{key}")


def _names_a_place(value: Any) -> bool:
    match value:
        case str():
            return value.startswith(("/", "~", "file:"))
        case dict():
            return any(_names_a_place(inner) for pair in value.items() for inner in pair)
        case list() | tuple():
            return any(map(_names_a_place, value))
    return False


def _name_functions(values: dict[str, Any], sources: RunSources) -> None:
    for number, function in enumerate(_functions(values)):
        if function.get("function"):
            function["function"] = sources.add_code(function["function"], REWARD_PLUGINS, f"rewards.functions.{number}")
    for place, section in _environments(values):
        if section.get("factory"):
            section["factory"] = sources.add_code(section["factory"], ENVIRONMENT_PLUGINS, f"{place}.factory")


def _environments(values: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the environments with their places, as `--set` names them."""
    several = [(f"environments.{number}", each) for number, each in enumerate(values.get("environments", []))]
    return [("environment", values.get("environment", {})), *several]


def _functions(values: dict[str, Any]) -> list[dict[str, Any]]:
    functions: list[dict[str, Any]] = values.get("rewards", {}).get("functions", [])
    return functions


def pack(config: RunConfig, folder: Path) -> bytes:
    """The bundle, encoded.

    Args:
        folder: of the configuration, in which names of files and modules begin.
    """
    sources = RunSources(folder.resolve())
    shared = gather(config, sources)
    text = yaml.dump(shared.values, Dumper=yaml.CSafeDumper, sort_keys=True, allow_unicode=True)
    files = [BundledFile(CONFIG_FILE, text.encode())]
    files += [BundledFile(name, content) for name, content in sources.files.items()]
    return encode(Bundle(files, requirements(sources.installed), shared.host_keys))


def gather(config: RunConfig, sources: RunSources) -> SharedConfig:
    """Add the files that producers need to `sources`. Raises BundleError as `pack` does."""
    shared = share(config, sources)
    for section in config.by_environment.values():
        _add_agent(section, sources)
    return shared


def _add_agent(section: EnvironmentSection, sources: RunSources) -> None:
    """Add the module that the agent imports, if the folder has it. Its imports are for the Python that plays it."""
    if section.agent is None:
        return
    sources.add_plugin(ENVIRONMENT_PLUGINS, section.agent, f"{section.key}.agent")
    ours = dict(sources.installed)
    if section.agent_options.module:
        sources.add_module(section.agent_options.module)
    if section.options.get("python"):
        sources.installed = ours
