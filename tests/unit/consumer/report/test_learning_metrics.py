"""Steps as Prometheus sees them."""

import math

import pytest
from prometheus_client import CollectorRegistry

from consumer.report.steps import LearningMetrics, StepRecord


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> LearningMetrics:
    return LearningMetrics(registry, ["exact", "format"], max_steps=50, max_staleness=2)


def step(metrics: LearningMetrics, number: int, **numbers: float) -> None:
    metrics.step(StepRecord(number, numbers, wait_s=0.5, step_s=2.0, tokens=100), 1000.0 + number)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(name, labels)
    assert found is not None, name
    return found


def test_before_the_first_step_what_it_would_say_is_not_a_number(
    registry: CollectorRegistry, metrics: LearningMetrics
) -> None:
    assert math.isnan(value(registry, "rl_trainer_reward"))
    assert math.isnan(value(registry, "rl_trainer_reward_by_function", function="format"))
    assert math.isnan(value(registry, "rl_trainer_importance_ratio", quantile="0.99"))
    assert value(registry, "rl_trainer_step") == value(registry, "rl_trainer_nonfinite_steps_total") == 0
    assert value(registry, "rl_trainer_max_steps") == 50
    assert value(registry, "rl_trainer_max_staleness_versions") == 2


def test_a_step_sets_gauges_and_adds_to_totals(registry: CollectorRegistry, metrics: LearningMetrics) -> None:
    ratio = "sampling/importance_sampling_ratio"
    step(metrics, 1, **{"reward": 0.5, "rewards/exact/mean": 0.25, f"{ratio}/p99": 1.5, "unknown": 9.0})
    step(metrics, 2, **{"reward": 0.75, "pipeline/max_staleness": 4})
    assert value(registry, "rl_trainer_reward") == 0.75
    assert value(registry, "rl_trainer_reward_by_function", function="exact") == 0.25, "the last known value stays"
    assert value(registry, "rl_trainer_importance_ratio", quantile="0.99") == 1.5
    assert value(registry, "rl_trainer_max_staleness_versions") == 4
    assert value(registry, "rl_trainer_step") == 2
    assert value(registry, "rl_trainer_last_step_timestamp_seconds") == 1002.0
    assert value(registry, "rl_trainer_wait_seconds_total") == 1.0
    assert value(registry, "rl_trainer_step_seconds_sum") == 4.0
    assert value(registry, "rl_trainer_tokens_trained_total") == 200


def test_staleness_is_counted_by_group(registry: CollectorRegistry, metrics: LearningMetrics) -> None:
    metrics.batch([0, 0, 1, 5])
    counts = {le: value(registry, "rl_trainer_staleness_versions_bucket", le=f"{le}.0") for le in (0, 1, 4, 6)}
    assert counts == {0: 2, 1: 3, 4: 3, 6: 4}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_a_loss_or_gradient_that_is_no_number_is_counted(
    registry: CollectorRegistry, metrics: LearningMetrics, name: str, bad: float
) -> None:
    step(metrics, 1, loss=0.1, grad_norm=1.0, reward=math.nan)
    assert value(registry, "rl_trainer_nonfinite_steps_total") == 0
    step(metrics, 2, **{"loss": 0.1, "grad_norm": 1.0} | {name: bad})
    assert value(registry, "rl_trainer_nonfinite_steps_total") == 1
    metrics.logged({"loss": 9.0, "grad_norm": 9.0, "learning_rate": 1e-5})
    assert value(registry, "rl_trainer_loss") != 9.0, "the mean over logging_steps, which is no step's"
    assert value(registry, "rl_trainer_learning_rate") == 1e-5


def test_sources_have_numbers_where_there_are_several(registry: CollectorRegistry) -> None:
    metrics = LearningMetrics(registry, ["exact"], max_steps=9, max_staleness=2, sources=["easy", "hard"])
    step(metrics, 1, **{"sources/easy/reward": 0.5, "sources/easy/success_rate": 0.25, "sources/other/reward": 1.0})
    step(metrics, 2, **{"sources/hard/batch_share": 0.75, "sources/hard/generation_s": 3.0})
    assert value(registry, "rl_trainer_source_reward", source="easy") == 0.5
    assert value(registry, "rl_trainer_source_success_ratio", source="easy") == 0.25
    assert math.isnan(value(registry, "rl_trainer_source_reward", source="hard"))
    assert value(registry, "rl_trainer_source_batch_ratio", source="hard") == 0.75
    assert value(registry, "rl_trainer_source_generation_seconds", source="hard") == 3.0
    assert registry.get_sample_value("rl_trainer_source_reward", {"source": "other"}) is None


def test_one_source_alone_is_no_label(registry: CollectorRegistry, metrics: LearningMetrics) -> None:
    step(metrics, 1, reward=0.5)
    labels = [sample.labels for family in registry.collect() for sample in family.samples]
    assert not any("source" in each for each in labels)
