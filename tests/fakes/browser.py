"""Chromium without a window, driven over its DevTools socket: what a page is for somebody who opens it.

Not a fake: it stands here because it is no test. Skips the test where there is no Chromium.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

LIMIT_S = 120.0
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-extensions", "--remote-debugging-port=0",
)  # fmt: skip


class Tab:
    """One open tab. `complaints` keeps what its console said: exceptions, refused assets."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.complaints: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One DevTools command and its result."""
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=LIMIT_S)
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(str(message["params"]))
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    async def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Goes there, in a window of that size."""
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.look(width=width, height=height, dark=dark)
        await self.call("Page.navigate", url=url)

    async def look(self, *, width: int, height: int, dark: bool = False) -> None:
        """Another window, another reader's colours."""
        mobile = width < 700
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=scheme)

    async def ask(self, expression: str) -> Any:
        """The value of an expression in the page."""
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str) -> None:
        """Waits for it to be true."""
        async with asyncio.timeout(LIMIT_S):
            while not await self.ask(expression):
                await asyncio.sleep(0.05)

    async def shoot(self, path: Path) -> None:
        """The whole page as a picture."""
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Tab]:
    """A Chromium of its own with one tab, its profile in `folder`."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium here")
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        program, *_FLAGS, f"--user-data-dir={folder}", "about:blank", stdout=quiet, stderr=quiet, start_new_session=True
    )
    try:
        note = folder / "DevToolsActivePort"
        async with asyncio.timeout(LIMIT_S):
            while not (note.exists() and "\n" in note.read_text()):
                assert process.returncode is None, "it did not start"
                await asyncio.sleep(0.05)
        port = note.read_text().splitlines()[0]
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
            async with http.get("/json/list") as listed:
                tabs = await listed.json(content_type=None)
            url = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
            async with http.ws_connect(url, max_msg_size=0) as socket:
                yield Tab(socket)
                await socket.send_json({"id": 0, "method": "Browser.close"})
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
