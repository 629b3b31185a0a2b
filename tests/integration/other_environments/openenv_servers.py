"""Two environments by the package `openenv`, which the Python that runs this has: PYTHON openenv_servers.py PORT PORT."""

import asyncio
import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class GuessAction(Action):
    guess: int


class GuessObservation(Observation):
    said: str = ""


class Guess(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self._secret = seed % 10
        return GuessObservation(said=" guess", done=False)

    def step(self, action, **_):
        if action.guess < 0:
            raise ValueError("below zero")
        is_right = action.guess == self._secret
        return GuessObservation(said="right" if is_right else "wrong", reward=1.0 if is_right else -0.25, done=is_right)

    @property
    def state(self):
        return State()


class Adding(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("adding")

        @server.tool
        def add(a: int) -> int:
            """Adds."""
            self._sum += a
            return self._sum

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **_):
        self._sum = seed
        return Observation(done=False)

    def _step_impl(self, action, **_):
        return Observation(done=False)

    @property
    def state(self):
        return State()


async def serve(ports: list[str]) -> None:
    kinds = {"guess": (Guess, GuessAction, GuessObservation), "tools": (Adding, CallToolAction, CallToolObservation)}
    apps = [create_app(*kind, env_name=name, max_concurrent_envs=2) for name, kind in kinds.items()]
    settings = {"host": "127.0.0.1", "log_level": "warning"}
    configs = [uvicorn.Config(app, port=int(port), **settings) for app, port in zip(apps, ports, strict=True)]
    await asyncio.gather(*(uvicorn.Server(config).serve() for config in configs))


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1:]))
