"""A real Prometheus with the configuration and rules of deploy/prometheus, for tests."""

import json
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from tests.promql import PROMETHEUS, Expression, rule_files
from tests.unit.protocol.channel_harness import reserve_port

from .runs import eventually


class Prometheus:
    """Scrapes a run every second. Its trainer is found by file discovery, its producer by what the trainer tells."""

    def __init__(self, folder: Path, run_dir: Path) -> None:
        folder.mkdir()
        for name, text in rule_files().items():
            (folder / name).write_text(text)
        [trainer] = [json.loads(file.read_text())[0] for file in run_dir.glob("metrics/rl-trainer-*.json")]
        config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        discovered, cluster, *_ = config["scrape_configs"]
        discovered["file_sd_configs"][0]["files"] = [f"{run_dir}/metrics/rl-trainer-*.json"]
        cluster["http_sd_configs"] = [{"url": f"http://{trainer['targets'][0]}/targets", "refresh_interval": "1s"}]
        cluster["relabel_configs"] = [{"action": "drop", "source_labels": ["job"], "regex": "rl-trainer"}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._reserved = ExitStack()
        address = f"127.0.0.1:{reserve_port(self._reserved)}"
        self._url = f"http://{address}/api/v1"
        with (folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    "--config.file=prometheus.yml",
                    "--storage.tsdb.path=data",
                    f"--web.listen-address={address}",
                ],
                cwd=folder,
                stdout=log,
                stderr=log,
            )

    def value(self, promql: str) -> list[float]:
        """What an expression gives now; empty if nothing."""
        return [float(sample["value"][1]) for sample in self.get("query", query=promql)["result"]]

    def get(self, path: str, **parameters: str) -> Any:
        """What its API answers; an expression that it does not understand raises an HTTPError."""
        url = f"{self._url}/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)["data"]

    def wait(self) -> None:
        """Until it answers."""

        def answers() -> bool:
            assert self._process.poll() is None, "Prometheus has ended"
            try:
                return bool(self.value("vector(1)"))
            except OSError:
                return False

        eventually(answers)

    def close(self) -> None:
        with self._reserved:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(60)


def pending(prometheus: Prometheus, expressions: list[Expression], timeout_s: float) -> list[Expression]:
    """Those that have no number, or only NaN, even after the time."""
    deadline = time.monotonic() + timeout_s
    while expressions and time.monotonic() < deadline:
        expressions = [one for one in expressions if all(value != value for value in prometheus.value(one.promql))]
        time.sleep(0.5)
    return expressions
