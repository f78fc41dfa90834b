"""What is final of telephone calls, appended to a file: delivered though nobody listens. Has a thread of its own."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


class CallLog:
    """One file of JSON lines."""

    def __init__(self, path: Path) -> None:
        """The file is opened now, so that one that can't be written stops the start."""
        self._file = path.open("a", encoding="utf-8")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="call-log")

    def write(self, line: str) -> None:
        """Append a line, in the order of the calls."""
        self._thread.submit(self._write, line)

    def _write(self, line: str) -> None:
        self._file.write(f"{line}\n")
        self._file.flush()

    def close(self) -> None:
        """Write what is due and close."""
        self._thread.shutdown()
        self._file.close()
