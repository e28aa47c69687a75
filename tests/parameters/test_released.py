"""Uses of a stage-3 parameter while it is released: tables of actions at every wrong moment.

Each action has a process of its own, so that a crash of the interpreter is reported (see `wrong_moments`).

    raises     a RuntimeError that names the parameter and gathered()
    nan        a result that is NaN throughout
    right      the parameter's true value of that moment, or the true answer to a question that needs no value
    done       no error at once
    told       the next step raises on every rank, names the parameter, and changes nothing
    goes on    training continues with the bits of the plain loop, as if nothing had been done
    keeps      ... as if the plain loop's parameter had been edited

Each program runs on ranks between which units travel, on one rank, and (`test_released_common`) on ranks with common
memory. Where units do not travel, what passes the class of a released parameter by finds its value. Where outcomes
differ, a table has all three.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import signal
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads

from ..support.plain import bits
from .wrong_moments import (
    NAME,
    OF_A_UNIT,
    OUTSIDE,
    Action,
    Forks,
    Net,
    Run,
    between,
    cast,
    edit,
    gathered,
    in_forward,
    later,
    loss_of,
    outcome,
    plain,
)

pytestmark = pytest.mark.contract


def scripted(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    made: Callable[[Tensor], Tensor] = torch.jit.script(function)
    return made


def doubled(tensor: Tensor) -> Tensor:
    return tensor * 2


def zeroed(tensor: Tensor) -> Tensor:
    return tensor.zero_()


def saved(thing: Any) -> int:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.tell()


def same_facts(run: Run) -> bool:
    """Return whether the properties of a parameter that do not depend on its values are right."""
    p = run.p
    facts = (p.shape, p.size(0), p.dtype, p.device, p.numel(), p.dim(), p.ndim, p.is_leaf, p.requires_grad, len(p))
    return facts == (torch.Size([3, 3]), 3, torch.float32, torch.device("cpu"), 9, 2, 2, True, True, 3)


def same_names(run: Run) -> bool:
    parameters = dict(run.model.named_parameters())
    return parameters[NAME] is run.p and list(parameters) == [name for name, _ in Net().named_parameters()]


INSTALLED = (
    f"<Parameter {NAME!r}, released (values inside optimizer.gathered()): shape (3, 3), torch.float32, cpu, "
    "requires_grad=True>"
)


def ones() -> Tensor:
    return torch.ones(3, 3, requires_grad=True)


def toggled(run: Run) -> bool:
    run.p.requires_grad_(False)
    frozen = not run.p.requires_grad
    run.p.requires_grad = True
    return frozen and run.p.requires_grad


def plain_optimizer(run: Run) -> bool:
    """Return whether torch.optim's step does nothing without a gradient, and else raises this library's error."""
    try:
        torch.optim.SGD([run.p], lr=1.0).step()
    except RuntimeError as error:
        return "full_grad" in str(error) or "gathered()" in str(error)
    return run.p.grad is None


MOMENTS = (*OUTSIDE, *OF_A_UNIT)
Outcome = str | tuple[str, str, str]  # everywhere; or where units travel, in common memory, on one rank
PAST_THE_CLASS = ("nan", "right", "right")

ACTIONS: dict[str, tuple[Outcome, Action]] = {
    "p + 1": ("raises", lambda run: run.p + 1),
    "1 - p": ("raises", lambda run: 1 - run.p),
    "repr(p)": ("right", lambda run: repr(run.p) == INSTALLED),
    "print(p)": ("done", lambda run: print(run.p)),
    "f'{p}'": ("right", lambda run: f"{run.p}{run.p!r}{format(run.p)}" == 3 * INSTALLED),
    "'%s' % p": ("right", lambda run: "%s %r" % (run.p, [run.p]) == f"{INSTALLED} [{INSTALLED}]"),  # noqa: UP031
    "Tensor.__repr__(p)": ("right", lambda run: nn.Parameter.__repr__(run.p).endswith(INSTALLED)),
    "f'{scalar:.2f}'": ("raises", lambda run: f"{run.scalar:.2f}"),
    "p.sum()": ("raises", lambda run: run.p.sum()),
    "p.tolist()": ("raises", lambda run: run.p.tolist()),
    "scalar.item()": ("raises", lambda run: run.scalar.item()),
    "float(scalar)": ("raises", lambda run: float(run.scalar)),
    "p.numpy()": ("raises", lambda run: run.p.numpy()),
    "np.asarray(p)": ("raises", lambda run: np.asarray(run.p)),
    "np.array([p])": ("raises", lambda run: np.array([run.p])),
    "np.from_dlpack(p)": ("raises", lambda run: np.from_dlpack(run.p)),
    "p.__dlpack__()": ("raises", lambda run: run.p.__dlpack__()),
    "p.detach()": ("raises", lambda run: run.p.detach()),
    "p.data": ("raises", lambda run: run.p.data),
    "p.data = ...": ("raises", lambda run: setattr(run.p, "data", torch.ones(3, 3))),
    "p.copy_()": ("raises", lambda run: edit(run, lambda p: p.copy_(torch.ones(3, 3)))),
    "p.mul_()": ("raises", lambda run: edit(run, lambda p: p.mul_(2))),
    "p.fill_()": ("raises", lambda run: edit(run, lambda p: p.fill_(2))),
    "p[0]": ("raises", lambda run: run.p[0]),
    "p[0] = 1": ("raises", lambda run: edit(run, lambda p: p.__setitem__(0, 1))),
    "p += 1": ("raises", lambda run: edit(run, lambda p: p.__iadd__(1.0))),
    "list(p)": ("raises", lambda run: list(run.p)),
    "bool(p)": ("raises", lambda run: bool(run.p)),
    "p.clone()": ("raises", lambda run: run.p.clone()),
    "p.to(float64)": ("raises", lambda run: run.p.to(torch.float64)),
    "p.to(float32)": ("right", lambda run: run.p.to(torch.float32) is run.p),
    "p.to('cpu')": ("right", lambda run: run.p.to("cpu", non_blocking=True) is run.p),
    "p.cpu()": ("right", lambda run: run.p.cpu() is run.p),
    "p.float()": ("right", lambda run: run.p.float(memory_format=torch.contiguous_format) is run.p),
    "p.type(float32)": ("right", lambda run: run.p.type(torch.float32) is run.p),
    "p.to(float32, copy=True)": ("raises", lambda run: run.p.to(torch.float32, copy=True)),
    "p.to('meta')": ("raises", lambda run: run.p.to("meta")),
    "p.to(device=...), not there": ("raises", lambda run: run.p.to("hpu")),
    "p.double()": ("raises", lambda run: run.p.double()),
    "p.bfloat16()": ("raises", lambda run: run.p.bfloat16()),
    "p.data = p": ("done", lambda run: setattr(run.p, "data", run.p)),
    "x.to(p)": ("raises", lambda run: torch.ones(3, 3).to(run.p)),
    "p.data_ptr()": ("raises", lambda run: run.p.data_ptr()),
    "p.untyped_storage()": ("raises", lambda run: run.p.untyped_storage()),
    "p.view(-1)": ("raises", lambda run: run.p.view(-1)),
    "p.T": ("raises", lambda run: run.p.T),
    "p.stride()": ("raises", lambda run: run.p.stride()),
    "p == x": ("raises", lambda run: run.p == torch.ones(3, 3)),
    "p in [x]": ("raises", lambda run: run.p in [torch.ones(3, 3)]),
    "torch.equal(x, p)": ("raises", lambda run: torch.equal(torch.ones(3, 3), run.p)),
    "linear(x, p)": ("raises", lambda run: nn.functional.linear(torch.ones(1, 3), run.p)),
    "unit.forward(x)": ("raises", lambda run: run.unit.forward(torch.ones(1, 3))),
    "torch.stack([p])": ("raises", lambda run: torch.stack([run.p])),
    "torch.zeros_like(p)": ("raises", lambda run: torch.zeros_like(run.p)),
    "torch._foreach_add_": ("raises", lambda run: edit(run, lambda p: torch._foreach_add_([p], 1.0))),
    "torch.ops.aten.add(p, 1)": ("raises", lambda run: torch.ops.aten.add(run.p, 1)),
    "nn.init.zeros_(p)": ("raises", lambda run: nn.init.zeros_(run.p)),
    "nn.Parameter(p)": ("raises", lambda run: nn.Parameter(run.p)),
    "copy.copy(p)": ("raises", lambda run: copy.copy(run.p)),
    "copy.deepcopy(p)": ("raises", lambda run: copy.deepcopy(run.p)),
    "pickle.dumps(p)": ("raises", lambda run: pickle.dumps(run.p)),
    "torch.save(p)": ("raises", lambda run: saved(run.p)),
    "torch.tensor(p)": (PAST_THE_CLASS, lambda run: torch.tensor(run.p)),
    "torch.Tensor(p)": (PAST_THE_CLASS, lambda run: torch.Tensor(run.p)),
    "p.as_subclass(Tensor)": (PAST_THE_CLASS, lambda run: run.p.as_subclass(Tensor)),
    "a scripted function": (PAST_THE_CLASS, lambda run: scripted(doubled)(run.p) / 2),
    "torch.func.vmap": (PAST_THE_CLASS, lambda run: torch.func.vmap(lambda row: row * 2)(run.p) / 2),
    "autograd.grad(p, p)": ("raises", lambda run: torch.autograd.grad(run.p, run.p, torch.ones(3, 3))),
    "autograd.backward(p)": ("raises", lambda run: torch.autograd.backward(run.p, torch.ones(3, 3))),
    "autograd.backward(x, p)": ("raises", lambda run: torch.autograd.backward(ones(), run.p, inputs=[run.p])),
    "torch.as_tensor(p) is p": ("right", lambda run: torch.as_tensor(run.p) is run.p),
    "p.shape and the like": ("right", same_facts),
    "model.named_parameters()": ("right", same_names),
    "p.requires_grad = False, True": ("right", toggled),
    "isinstance(p, nn.Parameter)": ("right", lambda run: isinstance(run.p, nn.Parameter)),
    "hash(p)": ("right", lambda run: {run.p: 1}[run.p] == 1 and hash(run.p) == id(run.p)),
    "p in [p]": ("right", lambda run: run.p in [run.p]),
    "weakref.ref(p)": ("right", lambda run: weakref.ref(run.p)() is run.p),
    "sys.getsizeof(p)": ("right", lambda run: sys.getsizeof(run.p) > 0),
    "repr(model)": ("right", lambda run: repr(run.model) == repr(Net())),
    "a plain optimizer": ("right", plain_optimizer),
}
"""What the parameter is asked, and what comes of it, at every moment alike."""

UNCHANGED: dict[str, Action] = {
    "model.float()": lambda run: run.model.float() is run.model,
    "model.cpu()": lambda run: run.model.cpu() is run.model,
    "model.to('cpu')": lambda run: run.model.to("cpu") is run.model,
    "model.to(float32)": lambda run: run.model.to(torch.float32) is run.model,
    "model.to('cpu', float32)": lambda run: run.model.to("cpu", torch.float32, non_blocking=True) is run.model,
    "model.to(a tensor)": lambda run: run.model.to(torch.ones(3)) is run.model,
    "model.type(float32)": lambda run: run.model.type(torch.float32) is run.model,
    "model.to(memory_format=...)": lambda run: run.model.to(memory_format=torch.channels_last) is run.model,
}
"""What changes nothing about the model, at every moment."""

WHOLE: dict[str, Action] = {
    "model.state_dict()": lambda run: run.model.state_dict(),
    "torch.save(model.state_dict())": lambda run: saved(run.model.state_dict()),
    "torch.save(model)": lambda run: saved(run.model),
    "model.load_state_dict()": lambda run: run.model.load_state_dict(Net().state_dict()),
    "copy.deepcopy(model)": lambda run: copy.deepcopy(run.model),
    "pickle.dumps(model)": lambda run: pickle.dumps(run.model),
    "model.to(float64)": lambda run: run.model.to(torch.float64),
    "model.half()": lambda run: run.model.half(),
    "model.to_empty()": lambda run: run.model.to_empty(device="cpu"),
    "model.to('meta')": lambda run: run.model.to("meta"),
    "model.share_memory()": lambda run: run.model.share_memory(),
    "parameters_to_vector": lambda run: nn.utils.parameters_to_vector(run.model.parameters()),
    "vector_to_parameters": lambda run: nn.utils.vector_to_parameters(torch.zeros(39), run.model.parameters()),
    "AveragedModel(model)": lambda run: torch.optim.swa_utils.AveragedModel(run.model),
}
"""What the model is asked: at every moment a RuntimeError that names one of its parameters."""


def doubled_in_place(thing: Any) -> None:
    thing *= 2


def assigned(p: nn.Parameter) -> None:
    p.data = torch.ones(3, 3)


def in_further_gathered(run: Run) -> Any:
    view = later(gathered(Tensor.detach))(run)
    return gathered(lambda _: view.clone())(run)


def while_it_comes(run: Run) -> bool:
    """Read a view while its unit is being gathered: every element is right or NaN."""
    view = later(gathered(Tensor.detach))(run)
    seen: list[Tensor] = []
    with run.model.blocks[0].register_forward_pre_hook(lambda *_: seen.append(view.clone())):
        run.model(run.batches()[0])
    return bool((seen[0].isnan() | (seen[0] == run.now())).all())


def whole_model(run: Run) -> Tensor:
    """Make a state dict, a copy and a pickled copy inside `gathered()`: they are plain, and can be trained."""
    with run.optimizer.gathered():
        state = copy.deepcopy(run.model.state_dict())
        twins = [Net(), copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model))]
    twins[0].load_state_dict(state)
    for twin in twins:
        torch.autograd.backward(loss_of(twin, run.batches()[0]))
        for ours, theirs in zip(twin.parameters(), twins[0].parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            assert torch.equal(bits(ours.grad), bits(theirs.grad))
    value: Tensor = state[NAME]
    return value


def closed(run: Run) -> Tensor:
    run.optimizer.close()
    return run.p


def closed_in_gathered(run: Run) -> Tensor:
    with run.optimizer.gathered():
        run.optimizer.close()
    return run.p


def without_optimizer(run: Run) -> bool:
    del run.optimizer
    gc.collect()
    with pytest.raises(RuntimeError, match="the optimizer that held this parameter's values is gone"):
        run.p.sum()
    with pytest.raises(RuntimeError, match="the optimizer that held this parameter's values is gone"):
        run.model.float()
    return "its optimizer is gone" in repr(run.p)


def unchanged(run: Run) -> Tensor:
    """Convert the model inside `gathered()`, and a unit in its forward; return the parameter."""
    with run.optimizer.gathered(), run.optimizer.gathered(write=True):
        run.model.to("cpu", torch.float32)
    in_forward(lambda _: run.unit.float())(run)
    with run.optimizer.gathered():
        return run.p.clone()


def swapped(p: nn.Parameter) -> None:
    swap: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors
    swap(p, nn.Parameter(torch.ones(3, 3)))


def replaced(run: Run) -> None:
    run.unit.weight = nn.Parameter(torch.ones(3, 3))


def loaded_by_assignment(run: Run) -> None:
    run.model.load_state_dict(Net().state_dict(), assign=True)


RIGHT, TOLD, FOR_GOOD, REFUSED = "right, goes on", "done, told, goes on", "done, told for good", "raises, goes on"
KEEPS, ZEROS = "done, keeps the edit", "done, keeps the zeros"
SCENES: dict[str, tuple[Outcome, Action]] = {
    "read in gathered()": (RIGHT, gathered(Tensor.clone)),
    "save and copy in gathered()": (RIGHT, whole_model),
    "model.to() that changes nothing, elsewhere": (RIGHT, unchanged),
    "a view from gathered()": (RIGHT, gathered(Tensor.detach)),
    "that view in a further gathered()": (RIGHT, in_further_gathered),
    "that view while the unit comes": (RIGHT, while_it_comes),
    "p.data = ... in gathered()": (TOLD, gathered(assigned)),
    "model.to(float64) in gathered()": (TOLD, cast(nn.Module.double)),
    "model.half() in gathered()": (TOLD, cast(nn.Module.half)),
    "model.share_memory() in gathered()": ((TOLD, FOR_GOOD, "done, goes on"), cast(nn.Module.share_memory)),
    "model.to('meta') in gathered()": (FOR_GOOD, cast(lambda model: model.to("meta"))),
    "p.data = ... in its forward": (REFUSED, in_forward(assigned)),
    "p.set_()": (TOLD, between(lambda p: p.set_(torch.ones(9).untyped_storage()))),
    "a scripted p.zero_()": ((TOLD, TOLD, ZEROS), between(lambda p: scripted(zeroed)(p))),
    "p.as_subclass(Tensor).zero_()": ((TOLD, TOLD, ZEROS), between(lambda p: p.as_subclass(Tensor).zero_())),
    "torch.utils.swap_tensors": (FOR_GOOD, between(swapped)),
    "module.weight = ...": (FOR_GOOD, replaced),
    "load_state_dict(assign=True)": (FOR_GOOD, loaded_by_assignment),
    "p after close()": ("right, over", closed),
    "p after close() in gathered()": ("right, over", closed_in_gathered),
    "p without its optimizer": ("right, over", without_optimizer),
}
"""What comes at once, and then, on any number of ranks."""

EDITS: dict[str, tuple[str, str, Action]] = {
    "p.mul_() in gathered()": (TOLD, KEEPS, gathered(doubled_in_place)),
    "p.detach().mul_() in gathered()": (TOLD, KEEPS, gathered(lambda p: doubled_in_place(p.detach()))),
    "p.data.mul_() in gathered()": (TOLD, KEEPS, gathered(lambda p: doubled_in_place(p.data))),
    "array *= 2 in gathered()": (TOLD, KEEPS, gathered(lambda p: doubled_in_place(p.detach().numpy()))),
    "p.mul_() in its forward": (REFUSED, "done, keeps the edit", in_forward(doubled_in_place)),
    "p.data.mul_() in its forward": (REFUSED, KEEPS, in_forward(lambda p: doubled_in_place(p.data))),
    "p.mul_() in gathered(write=True)": (KEEPS, KEEPS, gathered(doubled_in_place, write=True)),
    "p.data.mul_() in gathered(write=True)": (KEEPS, KEEPS, gathered(lambda p: doubled_in_place(p.data), write=True)),
}
"""What comes of an edit on two ranks, and on one, which has no other that could not see it."""

OF_KEPT = ("nan, goes on", RIGHT, RIGHT)
KEPT: dict[str, Action] = {
    "a view from gathered(), after a step": later(gathered(Tensor.detach)),
    "an array from gathered(), after a step": later(gathered(lambda p: p.detach().numpy())),
    "a view from a forward, after a step": in_forward(Tensor.detach),
    "an array from a forward, after a step": in_forward(lambda p: p.detach().numpy()),
}
"""What is read after a step: NaN where units travel, and right where they do not."""


def ask(transport: Transport, name: str) -> dict[str, str]:
    """Return the outcome of an action at each moment of one step, and how training continued."""
    run = Run(transport)
    action = ACTIONS[name][1] if name in ACTIONS else (WHOLE | UNCHANGED)[name]
    about = None if name not in ACTIONS else "blocks.1.scalar" if "scalar" in name else NAME
    found: dict[str, str] = {}

    def at(moment: str) -> None:
        if name in ACTIONS or moment in OUTSIDE:
            word = outcome(action, run, about)
            found[moment] = word if found.get(moment, word) == word else f"{found[moment]}; {word}"

    run.look(at)
    return {**found, "then": run.go_on()}


def act(transport: Transport, name: str) -> str:
    run = Run(transport)
    action = KEPT[name] if name in KEPT else (SCENES.get(name) or EDITS[name])[-1]
    return f"{outcome(action, run)}, {run.go_on()}"


def program_of(name: str) -> Callable[[Transport], Any]:
    """Return what a rank does with an action."""
    plain()  # run torch's very first step on a single thread
    program = ask if name in ACTIONS or name in WHOLE or name in UNCHANGED else act
    return lambda transport: program(transport, name)


def play(name: str) -> list[Any]:
    """Run an action in a process of its own: on two ranks between which units travel, and on one."""
    if name == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    return [on_threads(size, program_of(name), timeout=5) for size in (2, 1)]


def expected(outcome: Outcome, moments: Sequence[str] = ()) -> list[Any]:
    """Return the results of an action on ranks between which units travel, in common memory, and on one rank.

    ``moments``: those at which the action has this outcome, if it was asked at several.
    """
    by_ranks = (outcome, outcome, outcome) if isinstance(outcome, str) else outcome
    found: list[Any] = list(by_ranks)
    if moments:
        found = [{**dict.fromkeys(moments, one), "then": "goes on"} for one in by_ranks]
    return [[found[0]] * 2, [found[1]] * 2, [found[2]]]


def travelling_and_alone(outcome: Outcome, moments: Sequence[str] = ()) -> list[Any]:
    return expected(outcome, moments)[::2]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks(__name__)
    yield made
    made.stop()


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.by_default("p + 1", "p.numpy()", "p.mul_()", "p.to(float64)", "torch.tensor(p)", "repr(model)")
def test_a_released_parameter_gives_no_value_and_harms_nothing_at_any_moment(forks: Forks, name: str) -> None:
    assert forks.play(name) == travelling_and_alone(ACTIONS[name][0], MOMENTS)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.by_default("model.state_dict()", "model.load_state_dict()", "copy.deepcopy(model)", "model.half()")
def test_a_model_of_released_parameters_says_so_and_stays_whole(forks: Forks, name: str) -> None:
    assert forks.play(name) == travelling_and_alone("raises", OUTSIDE)


@pytest.mark.parametrize("name", UNCHANGED)
@pytest.mark.by_default("model.float()", "model.to('cpu')")
def test_what_changes_nothing_about_a_model_is_nothing(forks: Forks, name: str) -> None:
    assert forks.play(name) == travelling_and_alone("right", OUTSIDE)


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.full
def test_what_is_read_edited_moved_or_kept_is_right_or_told(forks: Forks, name: str) -> None:
    assert forks.play(name) == travelling_and_alone(SCENES[name][0])


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.by_default(
    "p.mul_() in gathered()",
    "array *= 2 in gathered()",
    "p.mul_() in its forward",
    "p.data.mul_() in gathered(write=True)",
)
def test_an_edit_is_told_or_kept(forks: Forks, name: str) -> None:
    several, one, _ = EDITS[name]
    assert forks.play(name) == travelling_and_alone((several, several, one))


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.by_default("a view from gathered(), after a step", "an array from a forward, after a step")
def test_what_is_kept_over_a_step_is_nan_or_follows(forks: Forks, name: str) -> None:
    assert forks.play(name) == travelling_and_alone(OF_KEPT)


def test_a_crash_would_be_seen(forks: Forks) -> None:
    assert forks.play("crash") == "the interpreter ended by SIGSEGV"
