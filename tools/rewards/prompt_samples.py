"""The first prompts of a run's dataset, for another process: `python -m tools.rewards.prompt_samples CONFIG NUM [KEY=VALUE ...]`.

Guarantee: one JSON object `{"prompt": ..., "columns": {...}}` per line, as producers are leased them; an error is one line on
standard error with its own exit code.
"""

import sys

import msgspec

from consumer.prompts.dataset import PromptDataset
from consumer.prompts.placeholders import check_has_rows
from protocol.config.loader import load_config
from protocol.errors import ExitCode, SlipstreamError
from protocol.wire.digests import resolve_model


def main(path: str, number: int, overrides: list[str]) -> int:
    try:
        config = load_config(path, overrides)
        check_has_rows(config)
        folder = resolve_model(
            config.model.path, config.model.revision, trust_remote_code=config.model.trust_remote_code
        )
        dataset = PromptDataset(config.dataset, folder, trust_remote_code=config.model.trust_remote_code)
        for prompt, columns in (dataset[index] for index in range(min(number, len(dataset)))):
            sys.stdout.buffer.write(msgspec.json.encode({"prompt": prompt, "columns": columns}) + b"\n")
    except SlipstreamError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
