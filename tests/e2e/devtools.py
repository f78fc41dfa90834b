"""A headless Chromium driven over the DevTools protocol: just what the browser tests need.

Knows the protocol and the process. Waiting is done inside the page against a deadline, never by sleeping here.
"""

import base64
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

WAIT_TIMEOUT_S = 90.0  # on a machine with other things to do; nothing waits longer than it must
CALL_TIMEOUT_S = WAIT_TIMEOUT_S + 30.0
PROBLEM_LEVELS = {"error", "assert"}
FLAGS = (
    "--headless",
    "--no-sandbox",  # containers run as root, where Chromium's own sandbox does not start
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)


class PageError(Exception):
    """An expression that threw, or did not become true in time; the message says what the page answered."""


def chromium() -> str | None:
    """The browser's executable, if this machine has one."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def fake_microphone(recording: Path, *, repeats: bool = False) -> tuple[str, ...]:
    """Flags that make ``recording`` (WAV) the sound of the microphone, and grant every request for it."""
    return (
        "--use-fake-device-for-media-stream",
        "--use-fake-ui-for-media-stream",
        f"--use-file-for-fake-audio-capture={recording}{'' if repeats else '%noloop'}",
    )


class Page:
    """One tab. Console errors, uncaught exceptions and failed loads gather in ``problems``."""

    def __init__(self, socket: ClientConnection, session_id: str) -> None:
        self.problems: list[str] = []
        self.events: list[dict[str, Any]] = []  # as they came; the latest last
        self._socket = socket
        self._session_id = session_id
        self._n_calls = 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to one protocol method; events that come before it are noted."""
        self._n_calls += 1
        request = {"id": self._n_calls, "sessionId": self._session_id, "method": method, "params": params}
        self._socket.send(json.dumps(request))
        while True:
            message = json.loads(self._socket.recv(timeout=CALL_TIMEOUT_S))
            if message.get("id") == self._n_calls and message.get("sessionId") == self._session_id:
                if "error" in message:
                    raise PageError(f"{method}: {message['error']['message']}")
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise PageError(f"{expression}: {_exception(answer['exceptionDetails'])}")
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """The value of ``expression`` once it is truthy."""
        return self.evaluate(
            f"""new Promise((resolve, reject) => {{
              const began = performance.now();
              const check = () => {{
                const value = ({expression});
                if (value) resolve(value);
                else if (performance.now() - began > {WAIT_TIMEOUT_S * 1000}) {{
                  reject(new Error("not so within {WAIT_TIMEOUT_S} s; the page reads: " + document.body.innerText));
                }} else setTimeout(check, 15);
              }};
              check();
            }})"""
        )

    def text(self, selector: str) -> str:
        """What the first element that matches reads."""
        text: str = self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent.trim()")
        return text

    def click(self, selector: str) -> None:
        """Click the first element that matches, as a user would as far as permissions go."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def press(self, key: str, code: str) -> None:
        """One key stroke where the focus is."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=code)

    def choose_file(self, selector: str, path: Path) -> None:
        """Choose ``path`` in a file input."""
        found = self.call("Runtime.evaluate", expression=f"document.querySelector({json.dumps(selector)})")
        self.call("DOM.setFileInputFiles", files=[str(path)], objectId=found["result"]["objectId"])

    def colour_scheme(self, scheme: str) -> None:
        """Have the system prefer ``light`` or ``dark``, and colours that change at once."""
        wanted = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in wanted.items()]
        self.call("Emulation.setEmulatedMedia", features=features)

    def size(self, width_px: int, height_px: int, *, scale: float = 1.0) -> None:
        """Give the page's area a size in CSS pixels; a narrow one is a phone."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width_px,
            height=height_px,
            deviceScaleFactor=scale,
            mobile=width_px < 600,
        )

    def screenshot(self, path: Path) -> None:
        """Write what is to be seen as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def wait_for_event(self, method: str, **wanted: Any) -> dict[str, Any]:
        """The parameters of the first event, past or to come, with ``method`` and the ``wanted`` parameters."""
        while True:
            for event in self.events:
                params: dict[str, Any] = event.get("params", {})
                if event["method"] == method and wanted.items() <= params.items():
                    return params
            self._note(json.loads(self._socket.recv(timeout=CALL_TIMEOUT_S)))

    def _note(self, message: dict[str, Any]) -> None:
        if "method" not in message:
            return
        self.events.append(message)
        params = message["params"]
        match message["method"]:
            case "Runtime.consoleAPICalled" if params["type"] in PROBLEM_LEVELS:
                self.problems.append("console: " + " ".join(str(arg.get("value", arg)) for arg in params["args"]))
            case "Runtime.exceptionThrown":
                self.problems.append("uncaught: " + _exception(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] in PROBLEM_LEVELS:
                self.problems.append(f"log: {params['entry']['text']} {params['entry'].get('url', '')}")


def _exception(details: dict[str, Any]) -> str:
    description: str = details.get("exception", {}).get("description") or details["text"]
    return description


@contextmanager
def open_page(url: str, profile: Path, flags: Sequence[str] = (), script: str = "") -> Iterator[Page]:
    """A page at ``url``, where ``script`` runs first, in a browser of its own with ``profile`` as its new folder."""
    executable = chromium()
    assert executable is not None, "ask `chromium()` first"
    command = [executable, *FLAGS, f"--user-data-dir={profile}", *flags, "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = _devtools_url(process)
            with connect(address, max_size=None, compression=None, open_timeout=CALL_TIMEOUT_S) as socket:
                yield _attach(socket, url, script)
        finally:
            process.terminate()


def _devtools_url(process: "subprocess.Popen[str]") -> str:
    """Read on until the browser names its socket; what it says afterwards is drained, so that it never blocks."""
    assert process.stderr is not None
    marker = "DevTools listening on "
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith(marker):
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return line.removeprefix(marker).strip()
    raise PageError("the browser did not start:\n" + "".join(said[-20:]))


def _attach(socket: ClientConnection, url: str, script: str) -> Page:
    targets = _browser_call(socket, "Target.getTargets", {})["targetInfos"]
    target_id = next(target["targetId"] for target in targets if target["type"] == "page")
    attached = _browser_call(socket, "Target.attachToTarget", {"targetId": target_id, "flatten": True})
    page = Page(socket, attached["sessionId"])
    for domain in ("Page", "Runtime", "Log"):
        page.call(f"{domain}.enable")
    page.call("Page.addScriptToEvaluateOnNewDocument", source=script)
    page.call("Page.navigate", url=url)
    page.wait_for_event("Page.loadEventFired")
    return page


def _browser_call(socket: ClientConnection, method: str, params: dict[str, Any]) -> dict[str, Any]:
    socket.send(json.dumps({"id": 0, "method": method, "params": params}))
    while True:
        message = json.loads(socket.recv(timeout=CALL_TIMEOUT_S))
        if message.get("id") == 0:
            result: dict[str, Any] = message["result"]
            return result
