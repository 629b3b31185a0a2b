"""Both sides of the benchmark of a training step have the same batch."""

import numpy as np

from benchmarks.trainer_step import SIZES
from benchmarks.trainer_step_side import _generated, config_of, groups_of


def test_trls_rows_are_those_of_the_groups(tmp_path) -> None:
    size = SIZES["cpu"] | {"correct": True, "attention": None}
    groups = groups_of(size)
    prompts, completions, _, _, logprobs, *_ = _generated(groups, with_logprobs=True)
    assert len(prompts) == len(completions) == config_of(size, tmp_path).completions_per_step == 32
    assert prompts[8:16] == [groups[1].prompt_ids.tolist()] * 8
    assert np.concatenate(completions[:8]).tolist() == groups[0].completion_ids.tolist()
    assert [len(part) for part in logprobs] == [len(part) for part in completions]
    assert max(map(len, completions)) > 3 * np.median([len(part) for part in completions]), "a long tail"
