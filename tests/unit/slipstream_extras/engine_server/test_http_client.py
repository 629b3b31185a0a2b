"""How a server is reached: keys, certificates, bounds."""

import logging
import ssl
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest
from aiohttp import web

from protocol.config.operation import EngineServerSection
from protocol.errors import ConfigError, EngineError
from protocol.http_client import HttpClient, ServerLostError, ServerMismatchError, open_session
from tests.tools import require
from tests.unit.producer.loop import asynchronous
from tests.unit.slipstream_extras.engine_server.running import running, servers


def secret_file(folder: Path, secret: str = "s3cret-k3y", mode: int = 0o600) -> str:
    file = folder / "server.key"
    file.write_text(f"{secret}\n")
    file.chmod(mode)
    return str(file)


@pytest.mark.long
@asynchronous
async def test_the_key_is_sent_and_never_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with servers(api_key="s3cret-k3y") as started:
        async with running(tmp_path, started, key_file=secret_file(tmp_path)) as engine:
            assert engine.servers.ready
        with pytest.raises(EngineError, match="refuses the key") as caught:
            async with running(tmp_path, started, key_file=secret_file(tmp_path, "s3cret-0ther")):
                pass
    assert "s3cret" not in caplog.text + str(caught.value)


@asynchronous
async def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = secret_file(tmp_path, mode=0o644)
    async with servers() as started:
        with pytest.raises(ConfigError, match=r"engine_server.key_file: .* others can read this secret"):
            async with running(tmp_path, started, key_file=file):
                pass


@asynchronous
async def test_no_redirect_is_followed_with_the_key(tmp_path: Path) -> None:
    async with servers() as started:
        started[0].answers["/health"] = deque(
            [lambda: web.Response(status=307, headers={"Location": "http://127.0.0.1:9/"})]
        )
        with pytest.raises(EngineError, match="status 307"):
            async with running(tmp_path, started, key_file=secret_file(tmp_path)):
                pass


@pytest.mark.parametrize("status", [200, 400])
@asynchronous
async def test_what_is_no_text_is_no_answer(tmp_path: Path, status: int) -> None:
    async with servers() as started:
        body = b'{"data": [{"id": "\xff"}], "error": "\xff"}'
        started[0].answers["/v1/models"].append(lambda: web.Response(body=body, status=status))
        with pytest.raises(EngineError, match=r"answers /v1/models in a form|is no vLLM server"):
            async with running(tmp_path, started):
                pass


def test_certificates_that_cannot_be_read_are_refused_with_their_key(tmp_path: Path) -> None:
    section = EngineServerSection(url=["https://localhost:1"], adapter_dir="x", ca_file=str(tmp_path / "none.pem"))  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"engine_server.ca_file: .*none.pem cannot be read"):
        open_session(section)


@asynchronous
async def test_a_certificate_counts_if_the_file_has_it(tmp_path: Path) -> None:
    require("openssl", "openssl")
    key, certificate = tmp_path / "tls.key", tmp_path / "tls.pem"
    subprocess.run(  # noqa: ASYNC221
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", key, "-out", certificate, "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    app = web.Application()
    app.router.add_get("/health", _well)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    url = f"https://localhost:{runner.addresses[0][1]}"
    try:
        for ca_file in (str(certificate), None):
            section = EngineServerSection(url=[url], adapter_dir="unused", ca_file=ca_file)  # type: ignore[call-arg]
            async with open_session(section) as session:
                client = HttpClient(session, url, 10.0)
                if ca_file:
                    assert await client.get_text("/health") == "well"
                else:
                    with pytest.raises(ServerMismatchError, match=r"set engine_server\.ca_file to the certificate"):
                        await client.get_text("/health")
    finally:
        await runner.cleanup()


async def _well(request: web.Request) -> web.Response:
    return web.Response(text="well")


@asynchronous
async def test_an_answer_without_end_is_cut(tmp_path: Path) -> None:
    async def endless() -> web.StreamResponse:
        return web.Response(body=b" " * (2**22 + 1))

    async with servers() as started:
        section = EngineServerSection(url=[started[0].url], adapter_dir="unused")  # type: ignore[call-arg]
        started[0].answers["/health"] = deque([endless])
        async with open_session(section) as session:
            client = HttpClient(session, started[0].url, 10.0)
            with pytest.raises(ServerMismatchError, match="answers /health with more than 4194304 bytes"):
                await client.get_text("/health")
            await started[0].kill()
            with pytest.raises(ServerLostError, match="cannot be reached"):
                await client.get_text("/health")


@pytest.mark.long
def test_a_producer_of_a_server_imports_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, producer.app.daemon, slipstream_extras.engine_server.engine\n"
        "from producer.rollouts.prompts import load_tokenizer\n"
        "import contextlib\n"
        "with contextlib.suppress(Exception):\n"
        "    load_tokenizer('/nowhere', trust_remote_code=False, without_torch=True)\n"
        "assert 'transformers' in sys.modules\n"
        "print(sorted({'vllm', 'torch'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert said.stdout.strip().endswith("[]"), said.stdout
