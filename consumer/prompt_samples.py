"""The first prompts of a run's dataset, for another process: `python -m consumer.prompt_samples CONFIG NUM [KEY=VALUE ...]`.

Guarantee: one JSON object `{"prompt": ..., "columns": {...}}` per line, as producers are leased them; an error is one line on
standard error with its own exit code.
"""

import sys

import msgspec

from consumer.placeholders import check_has_rows
from consumer.prompts import PromptDataset
from protocol.config_file import load_config
from protocol.digests import resolve_model
from protocol.errors import ExitCode, SlipstreamError


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
