"""A `vllm serve` without vLLM: the routes that the plugin `engine_server` uses, also for teachers, in vLLM's words.

Guarantee: what it computes depends on the weights of its model, of the adapter's files and on the tokens alone, so two servers of
one model agree. Whatever is asked for can be made to go wrong: `flags`, `answers` (what is said to the next requests of a route)
and `spoil` (what becomes of completions).
"""

import asyncio
import hashlib
import json
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

VOCABULARY, END = 30, 1


@dataclass
class Flags:
    """What it was started with."""

    model: str = "/models/small"
    weights: str = "small"
    max_model_len: int = 64
    enable_lora: bool = True
    allow_updates: bool = True
    max_lora_rank: int = 8
    max_loras: int | None = 8  # None: its metrics do not say
    logprobs_mode: str = "processed_logprobs"
    max_logprobs: int = 20
    api_key: str | None = None
    applies_adapters: bool = True
    vocabulary: int = VOCABULARY  # of what prompts may have
    characters: int = VOCABULARY - 2  # that its tokenizer tells apart


@dataclass
class ScriptedVllmServer:
    flags: Flags = field(default_factory=Flags)
    answers: dict[str, deque[Callable[[], Any]]] = field(default_factory=lambda: defaultdict(deque))  # by path
    spoil: Callable[[dict[str, Any]], None] = lambda body: None
    adapters: dict[str, str] = field(default_factory=dict)  # name to path
    names: list[str] = field(default_factory=list)  # of every load that succeeded
    asked: Counter[str] = field(default_factory=Counter)  # by path
    is_open: asyncio.Event = field(default_factory=asyncio.Event)  # groups wait for it
    waiting: int = 0
    load: dict[str, float] = field(default_factory=dict)  # metrics of its scheduler
    port: int = 0
    _runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> "ScriptedVllmServer":
        """Without adapters, at the port it had before."""
        self.adapters.clear()
        self.is_open.set()
        app = web.Application(middlewares=[self._scripted])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/tokenize", self._tokenize)
        if self.flags.allow_updates:
            app.router.add_post("/v1/load_lora_adapter", self._load)
            app.router.add_post("/v1/unload_lora_adapter", self._unload)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def kill(self) -> None:
        """Requests in it end without an answer."""
        if self._runner is not None:
            for server in self._runner.sites:
                await server.stop()
            if self._runner.server is not None:
                for connection in self._runner.server.connections:
                    connection.force_close()
            await self._runner.cleanup()
            self._runner = None

    async def restart(self, **flags: Any) -> None:
        await self.kill()
        for name, value in flags.items():
            setattr(self.flags, name, value)
        await self.start()

    def logprobs(self, model: str, token_ids: list[int], temperature: float) -> np.ndarray:
        """Of every token after these."""
        return _log_softmax(self._logits(model, token_ids) / temperature)

    def _logits(self, model: str, token_ids: list[int]) -> np.ndarray:
        weights = self.flags.weights.encode()
        if model in self.adapters and self.flags.applies_adapters:
            weights += (Path(self.adapters[model]) / "adapter_model.safetensors").read_bytes()
        seed = hashlib.sha256(weights + bytes(token_ids)).digest()[:8]
        return np.random.default_rng(int.from_bytes(seed, "little")).normal(0, 2, VOCABULARY)

    @web.middleware
    async def _scripted(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.asked[request.path] += 1
        if self.answers[request.path]:
            answer = self.answers[request.path].popleft()()
            if asyncio.iscoroutine(answer):
                answer = await answer
            if answer is not None:
                return answer
        key = self.flags.api_key
        if key and request.path != "/health" and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            return await handler(request)
        except web.HTTPNotFound:
            return web.json_response({"detail": "Not Found"}, status=404)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        slots = self.flags.max_loras
        text = "" if slots is None else f'vllm:lora_requests_info{{max_lora="{slots}",running_lora_adapters=""}} 1.0\n'
        label = f'{{engine="0",model_name="{self.flags.model}"}}'
        return web.Response(text=text + "".join(f"vllm:{name}{label} {value}\n" for name, value in self.load.items()))

    async def _models(self, request: web.Request) -> web.Response:
        model = self.flags.model
        cards = [{"id": model, "root": model, "parent": None, "max_model_len": self.flags.max_model_len}]
        cards += [{"id": name, "root": path, "parent": model} for name, path in self.adapters.items()]
        return web.json_response({"object": "list", "data": cards})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, folder = body["lora_name"], Path(body["lora_path"])
        if name in self.adapters:
            return refusal(400, f"The lora adapter '{name}' has already been loaded.")
        if not self.flags.enable_lora:
            return refusal(500, "Worker failed with error 'LoRA is not enabled. Use --enable-lora to enable LoRA.'")
        if not (folder / "adapter_config.json").is_file():
            return refusal(404, f"Loading lora {name} failed: No adapter found for <path>")
        rank = json.loads((folder / "adapter_config.json").read_text())["r"]
        if rank > self.flags.max_lora_rank:
            said = f"LoRA rank {rank} is greater than max_lora_rank {self.flags.max_lora_rank}."
            return refusal(500, f"Call to add_lora method failed: Worker failed with error '{said}'")
        self.adapters[name] = body["lora_path"]
        self.names.append(name)
        return web.Response(text="Success")

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if self.adapters.pop(name, None) is None:
            return refusal(404, f"The lora adapter '{name}' cannot be found.")
        return web.Response(text="Success")

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        begins = [0] if body["add_special_tokens"] else []
        tokens = begins + [2 + ord(each) % self.flags.characters for each in body["prompt"]]
        return web.json_response({"count": len(tokens), "max_model_len": self.flags.max_model_len, "tokens": tokens})

    async def _completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        model = body["model"]
        if model != self.flags.model and model not in self.adapters:
            return refusal(404, f"The model `{model}` does not exist. Valid aliases: <path>")
        if body.get("logprobs", 0) > self.flags.max_logprobs:
            said = f"greater than max allowed: {self.flags.max_logprobs} (parameter=logprobs)"
            return refusal(400, f"Requested sample logprobs of {body['logprobs']}, which is {said}")
        if body.get("prompt_logprobs", 0) > self.flags.max_logprobs:
            said = f"greater than max allowed: {self.flags.max_logprobs} (parameter=prompt_logprobs)"
            return refusal(400, f"Requested prompt logprobs of {body['prompt_logprobs']}, which is {said}")
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        if "prompt_logprobs" in body and (highest := max(map(max, prompts))) >= self.flags.vocabulary:
            return refusal(400, f"Token id {highest} is out of vocabulary")
        if body["max_tokens"] > 1:
            self.waiting += 1
            await self.is_open.wait()
            self.waiting -= 1
        bodies = [body | {"prompt": prompt} for prompt in prompts for _ in range(body.get("n", 1))]
        choices = [self._choice(one, index) for index, one in enumerate(bodies)]
        answer = {"model": model, "choices": choices}
        self.spoil(answer)
        return web.json_response(answer)

    def _choice(self, body: dict[str, Any], index: int) -> dict[str, Any]:
        model, prompt, chance = body["model"], body["prompt"], np.random.default_rng()
        token_ids, logprobs, tops = list[int](), list[float](), list[dict[str, float]]()
        temperature = body["temperature"] or 1.0
        while len(token_ids) < body["max_tokens"] and END not in token_ids:
            processed = self.logprobs(model, prompt + token_ids, temperature)
            told = (
                processed
                if self.flags.logprobs_mode == "processed_logprobs"
                else self.logprobs(model, prompt + token_ids, 1)
            )
            if self.flags.logprobs_mode.endswith("logits"):
                told = self._logits(model, prompt + token_ids)
            token = int(chance.choice(VOCABULARY, p=np.exp(processed)))
            best = np.argsort(-told)[: body.get("logprobs", 0)]
            tops.append({f"token_id:{one}": float(told[one]) for one in {token, *best.tolist()}})
            token_ids.append(token)
            logprobs.append(float(told[token]))
        scores: list[Any] = [None]
        for place in range(1, len(prompt)) if "prompt_logprobs" in body else ():
            found = self.logprobs(model, prompt[:place], 1.0)
            likely = {prompt[place]: 1} | {int(one): 1 for one in np.argsort(-found)[: body["prompt_logprobs"]]}
            scores.append({str(one): {"logprob": float(found[one]), "rank": rank} for one, rank in likely.items()})
        return {
            "index": index,
            "token_ids": token_ids,
            "prompt_token_ids": prompt,
            "finish_reason": "stop" if token_ids[-1] == END else "length",
            "logprobs": {"token_logprobs": logprobs, "top_logprobs": tops},
            "prompt_logprobs": scores if len(scores) > 1 else None,
        }


def refusal(status: int, message: str, **headers: str) -> web.Response:
    error = {"message": message, "type": "InternalServerError", "param": None, "code": status}
    return web.json_response({"error": error}, status=status, headers=headers)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
