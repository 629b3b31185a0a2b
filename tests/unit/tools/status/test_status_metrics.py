"""What `rl-status` reads is what the daemons declare."""

import ast
from pathlib import Path

from docs.generate_metrics import producer_registry, trainer_registry
from tools.status import reading as status_reading


def names_read() -> set[str]:
    tree = ast.parse(Path(status_reading.__file__).read_text())
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in texts if text.startswith(("rl_trainer_", "rl_producer_"))}


def test_every_metric_that_the_view_reads_is_declared() -> None:
    declared: set[str] = set()
    for registry in (trainer_registry(), producer_registry()):
        for family in registry.collect():
            declared |= {sample.name for sample in family.samples}
            declared |= {family.name} if family.type == "histogram" else set()
    read = names_read()
    assert len(read) > 40
    assert read - declared == set()
