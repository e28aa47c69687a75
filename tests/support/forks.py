"""A forked child of a rank: it runs an action, returns the result and ends.

The child ends with `os._exit`: an ordinary exit would wait for gloo's threads, which do not exist in a fork.
"""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Callable
from typing import Any

LIMIT = 15.0  # seconds; a child should need a tenth of a second


class Child:
    """A fork of this process that runs ``action``."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self._read, write = os.pipe()
        self._process = os.fork()
        if not self._process:
            try:
                os.write(write, json.dumps(action()).encode())
            except BaseException as error:
                os.write(write, json.dumps(f"{type(error).__name__}: {error}").encode())
            finally:
                os._exit(0)
        os.close(write)

    def said(self) -> Any:
        """Return the result of the action, after a round trip through JSON, or a text with its error."""
        if not select.select([self._read], [], [], LIMIT)[0]:
            os.kill(self._process, signal.SIGKILL)
        with os.fdopen(self._read, "rb") as pipe:
            data = pipe.read()
        os.waitpid(self._process, 0)
        return json.loads(data or b'"the child hung, or died"')


def said_by_a_child(action: Callable[[], Any]) -> Any:
    """Run ``action`` in a fork of this process while this process waits; return its result."""
    return Child(action).said()
