"""Turns token ids into text with the run's tokenizer, as far as the `tokenizers` library can, which needs no model and no torch.

Guarantee: no code that comes with a model is run, nothing is downloaded, and the tokenizer is the run's: where its digest is
another one than the journal's, there is none.
"""

from pathlib import Path
from typing import Any

from protocol.errors import SlipstreamError
from protocol.wire.model_folder import tokenizer_digest


class Decoder:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def texts(self, sequences: list[list[int]]) -> list[str]:
        """Return one text for each sequence of ids, with special tokens."""
        return list(self._tokenizer.decode_batch(sequences, skip_special_tokens=False))

    def pieces(self, ids: list[int]) -> list[str]:
        """The text of each token, which together are the text. A character that several tokens make is that of the last one."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        found = [stream.step(self._tokenizer, token) or "" for token in ids]
        shown = "".join(found)
        whole = self.texts([ids])[0]
        if found and len(whole) > len(shown) and whole.startswith(shown):  # the last character is not complete
            found[-1] += whole[len(shown) :]
        return found


def find_decoder(facts: dict[str, str], folder: Path | None = None) -> tuple[Decoder | None, str]:
    """The decoder of a run, and why there is none. `folder` has the tokenizer if it is not where the run had it."""
    name = facts.get("model_path")
    if folder is None and name is None:
        return None, "the journal does not name its model"
    place = folder or Path(str(name))
    file = place / "tokenizer.json" if place.is_dir() else _cached(str(name))
    if file is None or not file.is_file():
        return None, f"{place} has no tokenizer.json here; name a folder that has one with --tokenizer"
    try:
        from tokenizers import Tokenizer

        trusted = facts.get("trust_remote_code") == "true"
        if facts.get("tokenizer_digest", found := tokenizer_digest(file.parent, trust_remote_code=trusted)) != found:
            return None, f"the tokenizer in {file.parent} is not the one of the run"
        return Decoder(Tokenizer.from_file(str(file))), ""
    except (SlipstreamError, OSError) as error:
        return None, f"the tokenizer of {place} cannot be loaded: {error}"
    except Exception as error:  # the error of `tokenizers` for a damaged file has no class of its own
        return None, f"the tokenizer of {place} cannot be loaded: {error}"


def _cached(name: str) -> Path | None:
    """The file of a model of the hub, if it is in the cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "tokenizer.json")
    except HFValidationError:  # the name of a folder that is not here
        return None
    return Path(found) if isinstance(found, str) else None
