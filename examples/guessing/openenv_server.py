"""The game as a server of OpenEnv. Run it with a Python that has `openenv`:

    PYTHON examples/guessing/openenv_server.py [PORT]

An action has the guess as text, an observation what is said to it; `reset` takes the secret.
"""

import sys
from pathlib import Path
from typing import Any

import uvicorn
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

sys.path.insert(0, str(Path(__file__).parent))

from game import Game  # type: ignore[import-not-found]

MAX_SESSIONS = 64


class GuessAction(Action):
    guess: str


class GuessObservation(Observation):
    said: str | None = None


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, secret: int, **_: Any) -> GuessObservation:
        self._game = Game(secret)
        return GuessObservation(done=False)

    def step(self, action: GuessAction, **_: Any) -> GuessObservation:
        said, reward, done = self._game.answer(action.guess)
        return GuessObservation(said=said, reward=reward, done=done)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_app(Guessing, GuessAction, GuessObservation, env_name="guessing", max_concurrent_envs=MAX_SESSIONS)
    uvicorn.run(app, host="127.0.0.1", port=int((sys.argv[1:] or ["8123"])[0]), log_level="warning")
