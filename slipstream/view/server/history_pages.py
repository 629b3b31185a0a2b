"""The page that follows one prompt through the run.

Guarantee: the texts are those of the journal; the means are those of the index, and of its state when the page is made.
"""

from starlette.requests import Request
from starlette.responses import Response

from slipstream.view.index.prompts import MOST, attempts, by_version
from slipstream.view.index.texts import progress
from slipstream.view.server.rendering import page
from slipstream.view.server.viewer import Viewer


class HistoryPages:
    def __init__(self, viewer: Viewer) -> None:
        self._viewer = viewer

    def prompt(self, request: Request) -> Response:
        prompt = request.path_params["prompt"]
        with self._viewer.journal() as reader, self._viewer.index() as db:
            rows = reader.rows_of(attempts(db, prompt)) if db else []
            letters = [letter for letter in reader.dead_letters() if letter.prompt_id == prompt][-MOST:]
            return page(
                request, "prompt.html", self._viewer.name, prompt=prompt, rows=rows, letters=letters, most=MOST,
                shown=self._viewer.shown(reader, rows[-1]) if rows else None,
                versions=by_version(db, prompt) if db else [], done=progress(db, reader.bounds()[1]),
            )  # fmt: skip
