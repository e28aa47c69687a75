"""Whether an error of a test has caught a bug.

caught        a test's own assertion, a documented error (`ValueError`, `TypeError` or `RuntimeError` by a ``raise``
              of the library), a time limit
not caught    a crash: another error of Python or of torch, the library's own ``assert``
"""

from __future__ import annotations

import dis

from _pytest.outcomes import Failed

from .live import ROOT

INSIDE = (str(ROOT / "zero"), str(ROOT / "collectives"), str(ROOT / "tests/support/trials.py"))  # which repeats errors
CRASHES = ("ImportError", "ModuleNotFoundError", "NameError", "UnboundLocalError", "AttributeError")
CRASHES += ("IndexError", "KeyError", "NotImplementedError")


def catches(error: BaseException) -> bool:
    """Return whether an error is no crash. Of several, none may be one."""
    if isinstance(of_all := getattr(error, "exceptions", None), tuple):  # Hypothesis may report several failures
        return all(map(catches, of_all))
    if isinstance(by_rank := getattr(error, "errors", None), dict):  # of processes: their names and messages
        return not any(name in CRASHES for name, _ in by_rank.values())
    hidden = error.__context__
    if isinstance(error, AssertionError) and hidden is not None and "Regex pattern did not match" in str(error):
        return catches(hidden)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    code = None if trace is None else trace.tb_frame.f_code
    is_inside = code is not None and code.co_filename.startswith(INSIDE)
    if isinstance(error, (AssertionError, Failed)):
        return not is_inside
    if trace is None or code is None or type(error).__name__ in CRASHES:
        return False
    is_raised = is_inside and dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
    return isinstance(error, TimeoutError) or (is_raised and isinstance(error, (ValueError, TypeError, RuntimeError)))
