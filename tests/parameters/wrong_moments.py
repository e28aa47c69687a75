"""Helpers of `test_released`: a small training run that reports each moment to a callback, and processes for actions.

A helper process imports torch once and forks for each action. In the fork ranks train as threads, act, and continue
training; the outcome is returned as JSON. A crash ends only the fork, and is reported.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from collectives import Transport
from zero import ZeroOptimizer

from ..support.plain import bits, plain_step

NAME, INDEX = "blocks.1.weight", 3
OF_A_UNIT = (
    "in the forward of the unit before",
    "in the forward of the unit behind",
    "in the backward of the unit behind",
    "in the backward of the unit before",
)
OUTSIDE = ("between steps", "after an evaluation", "between forward and backward", "between backward and step")
STEPS, LIMIT = 6, 30.0
_NAMED = re.compile(r"'(first|blocks\.\d)\.(weight|scalar)'")
_LOOK = threading.local()  # holds the callback of the rank that trains, which gets the name of each moment


class Block(nn.Module):
    """A unit that reports to `_LOOK` where training is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3) + 0.25)
        self.scalar = nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs: Tensor, place: str = "") -> Tensor:
        look = getattr(_LOOK, "at", None)
        if look is not None and place:
            look(f"in the forward of the unit {place}")
            inputs.register_hook(lambda _: look(f"in the backward of the unit {place}"))  # type: ignore[no-untyped-call]
        return torch.tanh(inputs @ self.weight) * self.scalar


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        nn.init.constant_(self.first.weight, 0.5)

    def block(self, number: int) -> Block:
        found = self.blocks[number]
        assert isinstance(found, Block)
        return found

    def forward(self, inputs: Tensor) -> Any:
        hidden = self.blocks[0](self.first(inputs), "before")
        return self.blocks[2](self.blocks[1](hidden), "behind")


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().sum()
    return loss


def _batches(step: int) -> list[Tensor]:
    return [torch.linspace(-1, 1 + step, 6).view(2, 3) + j for j in range(2)]


@functools.cache
def plain(times: float = 1) -> list[list[Tensor]]:
    """Return the parameters before each step of the plain loop. ``times``: the factor of an edit of ``p`` after the
    first step."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    trace = []
    for step in range(STEPS):
        if step == 1:
            with torch.no_grad():
                model.block(1).weight.mul_(times)
        trace.append([parameter.detach().clone() for parameter in model.parameters()])
        plain_step(model, optimizer, loss_of, _batches(step), 2)
        optimizer.zero_grad()
    return trace


class Run:
    """The training of one rank. ``p`` is the parameter that actions use, ``scalar`` another parameter of its unit."""

    def __init__(self, transport: Transport) -> None:
        self.rank, self.world_size, self.steps = transport.rank, transport.world_size, 0
        self.model = Net()
        self.optimizer = ZeroOptimizer(
            self.model, torch.optim.AdamW, stage=3, process_group=transport, divisor=2, lr=0.05
        )
        self.unit = self.model.block(1)
        self.p, self.scalar = self.unit.weight, self.unit.scalar
        self.train()

    def batches(self) -> list[Tensor]:
        return _batches(self.steps)[self.rank :: self.world_size]

    def look(self, at: Callable[[str], None]) -> None:
        """Train one step, and call ``at`` with the name of each moment."""
        at("between steps")
        with torch.no_grad():
            self.model(self.batches()[0])
        at("after an evaluation")
        _LOOK.at = at
        try:
            self.train(at)
        finally:
            del _LOOK.at

    def train(self, at: Callable[[str], None] = lambda moment: None) -> None:
        """Train one step."""
        for batch in self.batches():
            loss = loss_of(self.model, batch)
            at("between forward and backward")
            torch.autograd.backward(loss)
        at("between backward and step")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def now(self) -> Tensor:
        """Return the value of ``p`` in the plain loop."""
        return plain()[self.steps][INDEX]

    def go_on(self) -> str:
        """Continue training after an action.

        Return the outcome of the next step, and which plain loop has the same parameters.
        """
        if not hasattr(self, "optimizer"):
            return "over"
        said = ""
        try:
            self.optimizer.zero_grad()
            self.train()
        except RuntimeError as error:
            if "this optimizer is closed" in str(error):
                return "over"
            said = "told, " if _NAMED.search(str(error)) else f"told {error}, "
            try:
                self.optimizer.zero_grad()
                self.optimizer.step()
            except RuntimeError as again:
                return "told for good" if _NAMED.search(str(again)) else f"told for good {again}"
            self.train()
        self.optimizer.close()
        for word, trace in {"goes on": plain(), "keeps the edit": plain(2), "keeps the zeros": plain(0)}.items():
            pairs = zip(self.model.parameters(), trace[self.steps], strict=True)
            if all(torch.equal(bits(a), bits(b)) for a, b in pairs):
                return said + word
        return said + "WRONG NUMBERS"


def outcome(action: Callable[[Run], Any], run: Run, name: str | None = None) -> str:
    """Describe the result of an action in one word, or an unexpected one in more.

    ``name``: the parameter that an error must name.
    """
    try:
        found = action(run)
    except RuntimeError as error:
        named = f"'{name}'" in str(error) if name is not None else _NAMED.search(str(error)) is not None
        return "raises" if named and "gathered(" in str(error) else f"raises {error}"
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    if found is None:
        return "done"
    if found is True:
        return "right"
    if isinstance(found, (Tensor, np.ndarray)) and not (found is run.p and hasattr(type(found), "released")):
        value = torch.as_tensor(found).detach()
        if value.numel() and bool(value.isnan().all()):
            return "nan"
        if value.shape == (3, 3) and torch.equal(bits(value), bits(run.now())):
            return "right"
    return f"answers a {type(found).__name__}"


Action = Callable[[Run], Any]
OfP = Callable[[nn.Parameter], Any]


def edit(run: Run, action: OfP) -> Any:
    with torch.no_grad():
        return action(run.p)


def gathered(action: OfP, write: bool = False) -> Action:
    """Return an action that runs inside `gathered()`."""

    def act(run: Run) -> Any:
        with torch.no_grad(), run.optimizer.gathered(write=write):
            return action(run.p)

    return act


def in_forward(action: OfP) -> Action:
    """Return an action that runs in the forward of ``p``'s own unit, within a whole step."""

    def act(run: Run) -> Any:
        kept: list[Any] = []

        def hook(*_: Any) -> None:
            if torch.is_grad_enabled() and not kept:
                with torch.no_grad():
                    kept.append(action(run.p))

        with run.unit.register_forward_pre_hook(hook):
            run.train()
        return kept[0]

    return act


def later(action: Action) -> Action:
    """Return an action whose result is read after a further step."""

    def act(run: Run) -> Any:
        found = action(run)
        run.train()
        return found

    return act


def between(action: OfP) -> Action:
    """Return an action that runs between steps, when parameters are released."""

    def act(run: Run) -> None:
        edit(run, action)

    return act


def cast(action: Callable[[nn.Module], Any]) -> Action:
    """Return an action on the whole model inside `gathered()`."""

    def act(run: Run) -> None:
        with run.optimizer.gathered():
            action(run.model)

    return act


def serve(module: str) -> None:
    """Run the helper process: for each name on stdin, call ``module.play(name)`` in a fork."""
    torch.set_num_threads(1)
    play = importlib.import_module(module).play
    importlib.import_module("torch._dynamo")  # once, before the forks: the first optimizer of each would import it
    gc.freeze()  # a collection in a fork would copy the pages that it shares
    answers, requests = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(0))
    os.dup2(2, 1)  # the output of an action must not mix with the answers
    for line in requests:
        print(json.dumps(_in_a_fork(play, json.loads(line))), file=answers, flush=True)


def _in_a_fork(play: Callable[[str], Any], name: str) -> Any:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        status = 1
        try:
            os.write(write, json.dumps(play(name)).encode())
            status = 0
        except BaseException:
            os.write(write, json.dumps(traceback.format_exc()[-2000:]).encode())
        finally:
            os._exit(status)
    os.close(write)
    ready, _, _ = select.select([read], [], [], LIMIT)
    if not ready:
        os.kill(child, signal.SIGKILL)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        return f"the interpreter ended by {signal.Signals(-code).name}" + ("" if ready else ", after its time limit")
    return json.loads(data)


class Forks:
    """A handle to the helper process."""

    def __init__(self, module: str) -> None:
        command = [sys.executable, "-c", f"from {__name__} import serve; serve({module!r})"]
        root = Path(__file__).resolve().parents[2]
        self._process = subprocess.Popen(
            command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def play(self, name: str) -> Any:
        """Return the result of ``play(name)``, or a text that describes the failure."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(name), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline() or '"the helper process ended"')

    def stop(self) -> None:
        """End the helper process, which returns at the end of its input."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=LIMIT)
        self._process.kill()
        self._process.wait()
