"""A process that has imported torch and pytest, and forks for each run of tests: imports take longer than tests.

It is started as a script, so that it imports nothing of the repository; a child imports that from the folder in its
request. A request is a line of JSON on standard input, the answer the exit status of pytest.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from typing import Any, NoReturn


def serve() -> None:
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch._dynamo  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run(folder: str, arguments: list[str], environment: dict[str, str], out: str, limit: float) -> NoReturn:
    import pytest

    code: Any = 1
    try:
        os.chdir(folder)
        os.environ.update(environment)
        sys.path[0] = folder
        for stream, number in (
            (os.open(os.devnull, os.O_RDONLY), 0),
            (os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1),
        ):
            os.dup2(stream, number)
        os.dup2(1, 2)
        faulthandler.dump_traceback_later(limit, exit=True)
        code = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
