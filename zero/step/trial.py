"""The trial of a class: steps as ranks take them give the bits of its own steps over whole parameters.

A class steps throw-away parameters with the options of the user's param groups; equal options are tried once. There are
two trials: of steps over pieces of parameters (`ByElement`), and over each parameter by itself (`ByParameter`).

Whether a class's own steps depend on what ranks part: the dtypes of a param group, and the length of a tensor.

Knows: which options are tried, and which results must be equal. Does not know: how throw-away parameters look and are
laid out, ranks.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import methodcaller
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.grain import BY_ELEMENT, WHOLE, Grain
from ..core.layout import Dtypes, ParameterSpec
from ..core.runs import is_elementwise
from ..core.stage import step_device
from ..core.statetree import FormatError, Rebuild, decode, encode, kinds_in
from ..runtime.flat_states import Options
from .arguments import equal_values, same
from .throwaway import ClassFailedError, FullParameters, OnRank, Placed, Setting, large_shapes, placed, shortened
from .user_optimizer import NO_OPTIONS, NotElementwiseError, UserOptimizer

SCALES = (1e-9, 1e-4)  # gradients below and between the eps of dtypes, by which a class may bound its divisors
SHORT, LONG = 15, 33  # elements: fewer than a kernel computes at once, and more


def check_dtypes(
    inner: UserOptimizer, options: Sequence[Options], parameters: Sequence[Placed], specs: Sequence[ParameterSpec]
) -> None:
    """Raise `ValueError` if the class steps parameters of one dtype otherwise beside those of another in their group.

    ``options``: of each group; ``parameters``: throw-away ones; ``specs``: the user's.
    """
    kinds = list(dict.fromkeys((setting.options, setting.dtypes.step_dtype) for setting, _ in parameters))
    if len(kinds) == len({number for number, _ in kinds}):
        return
    apart = [(replace(s, options=kinds.index((s.options, s.dtypes.step_dtype))), shape) for s, shape in parameters]
    try:
        beside = FullParameters(inner, options, parameters)
        alone = FullParameters(inner, [options[number] for number, _ in kinds], apart)
        for step, scale in enumerate(SCALES):
            for each in (beside, alone):
                each.step([gradient * scale for gradient in each.gradients(step)])
    except ClassFailedError:  # it takes no second group, or no such gradients
        return
    for one, other in zip(beside.parameters, alone.parameters, strict=True):
        if not (same(one, other) or beside.draws):  # random numbers differ anyway
            found = {(spec.group, spec.dtypes.step_dtype): spec.name for spec in specs}
            groups = [group for group, _ in found]
            name = next(n for (group, dtype), n in found.items() if dtype is one.dtype and groups.count(group) > 1)
            raise ValueError(
                f"{inner.name} steps {name!r}, in {one.dtype}, in another way if its param group has other dtypes, "
                "too, and ranks step each dtype by itself: give each dtype a param group, or name the option that the "
                "class takes from a parameter's dtype (Adafactor: eps)"
            )


def check_kernels(
    inner: UserOptimizer, options: Sequence[Options], settings: Sequence[Setting], specs: Sequence[ParameterSpec]
) -> None:
    """Raise `ValueError` if a fused loop leaves some elements of a tensor as they are, and none of a shorter one.

    All are 0 and have one gradient, so that no rounding hides a step. Torch's fused SGD in 16 bits on the CPU does so,
    and reads momentum beyond the end of a tensor.
    """
    for setting in settings:
        if not options[setting.options].get("fused"):
            continue
        try:
            made = FullParameters(inner, options, [(setting, (size,)) for size in (SHORT, LONG)])
            for parameter in made.parameters:
                parameter.detach().zero_()
            made.step([torch.ones_like(parameter) for parameter in made.parameters])
        except ClassFailedError:  # it takes no vectors
            continue
        short, long = (int(parameter.count_nonzero()) for parameter in made.parameters)
        if short == SHORT and 0 < long < LONG:
            kind = setting.dtypes.step_dtype, str(setting.device)
            name = next(spec.name for spec in specs if (spec.dtypes.step_dtype, step_device(spec)) == kind)
            raise ValueError(
                f"{inner.name} steps {long} of {LONG} elements of a tensor in {kind[0]} on {kind[1]}, as {name!r} is: "
                "its kernel there is wrong. Name another loop (fused=False), or keep fp32 weights (mixed_precision=)"
            )


STEPS = 12  # more than classes take to warm up by themselves (RAdam 5, SOAP 10)
# With a lower learning rate, which a scheduler may raise later, rounding could hide an update; with a lower weight
# decay, how the decay is rounded. It is no power of two: products with one are exact, whatever a kernel rounds.
RAISED_RATE = 0.3
FEW_STEPS = 3  # with the user's learning rates, before low ones are raised, and with raised weight decays
DIMENSIONS = frozenset({0, 1, 2, 4})
COPIES = 2  # throw-away parameters of each shape: a class may look at others of the same shape alone


class Trial:
    """A trial of one class with parameters of one grain. The grains are its subclasses."""

    grain: ClassVar[Grain]
    copies: ClassVar[int] = 1  # throw-away parameters of each shape
    every: ClassVar[int] = 1  # steps from one comparison of the parameters to the next
    parts: ClassVar[str]  # words for what a rank steps, and for what the class steps in a plain loop
    full: ClassVar[str]
    other_bits: ClassVar[str]  # the error of a parameter, given by its shape

    def __init__(self, inner: UserOptimizer, groups: Sequence[Options], parameters: Sequence[ParameterSpec]) -> None:
        """``groups``: all param groups; ``parameters``: those of the class, at least one."""
        self.inner = inner
        self.options, self.settings = distinct(inner.defaults, groups, parameters)
        self._parameters, self._placed = parameters, self.choose(parameters)

    def run(self) -> tuple[frozenset[str], dict[str, Rebuild]]:
        """Raise `ValueError` unless steps as ranks take them give the class's own bits.

        Returns the names of the states that are as large as the parameter, and the tensor subclasses among states. The
        states of random generators do not change.
        """
        with random_state_kept(self.settings):
            check_kernels(self.inner, self.options, self.settings, self._parameters)
            try:
                return self.steps()
            finally:  # raised in the place of the other error, since it names a remedy
                check_dtypes(self.inner, self.options, self._placed, self._parameters)

    def steps(self) -> tuple[frozenset[str], dict[str, Rebuild]]:
        """Do what `run` says. Low learning rates are raised to `RAISED_RATE`, if the class accepts that."""
        return self.compare_with([("lr",), ()] if self.any_is_low("lr") else [()], STEPS)

    def any_is_low(self, name: str) -> bool:
        """Return whether an option of this name is low."""
        return any(_is_low(given, name) for given in self.options)

    def compare_with(self, raised: Iterable[Sequence[str]], steps: int) -> tuple[frozenset[str], dict[str, Rebuild]]:
        """Compare with low options raised: those of the first names in ``raised`` that the class accepts.

        If it accepts none, the shapes that it refuses are left out, unless the user's parameters have them.
        """
        for names in raised:
            try:
                return self.compare(*self.with_raised(names), steps)
            except ClassFailedError:
                pass
        self._leave_out_refused()
        try:
            return self.compare(self.inner, self.options, steps)
        except ClassFailedError as error:
            raise self.refusal(f"a step over several parameters failed ({error})") from error

    def with_raised(self, names: Sequence[str]) -> tuple[UserOptimizer, list[Options]]:
        """Return the class and the options, where those of ``names`` that are low are raised to `RAISED_RATE`.

        They are raised both in the class's arguments and in the groups, since a class may keep both. Raises
        `ClassFailedError` if the class refuses such a rate.
        """
        raised = self.inner
        try:
            raised = self.inner.another(**_raised(self.inner.defaults, names))
        except TypeError:
            pass  # the class has no argument for it
        except Exception as error:
            raise ClassFailedError(str(error)) from error
        return raised, [{**given, **_raised(given, names)} for given in self.options]

    def _leave_out_refused(self) -> None:
        """Raise `ValueError` if the class refuses all throw-away parameters, or those like one of the user's."""
        refused: dict[Placed, Exception] = {}
        for each in dict.fromkeys(self._placed):
            try:
                whole = FullParameters(self.inner, self.options, [each])
                for step in range(STEPS):
                    whole.step(whole.gradients(step))
            except ClassFailedError as error:
                refused[each] = error
        for (setting, shape), problem in refused.items():
            if len(refused) == len(set(self._placed)):
                raise self.refusal(f"a step over a throw-away parameter failed ({problem})") from problem
            for spec in self._parameters:
                if spec.shape in setting.shapes and self.stands_for(shape, spec):
                    raise ValueError(
                        f"{self.inner.name} refuses {spec.name!r}, of shape {spec.shape}: {problem}. Pass this class "
                        "only parameters that it accepts"
                    ) from problem
        self._placed = [each for each in self._placed if each not in refused]

    def compare(
        self, inner: UserOptimizer, options: Sequence[Options], steps: int
    ) -> tuple[frozenset[str], dict[str, Rebuild]]:
        """Step throw-away parameters whole and as ranks do, and compare.

        Raises `ValueError` on a difference, `ClassFailedError` if the class raised over whole parameters.
        """
        whole = FullParameters(inner, options, [each for each in self._placed for _ in range(self.copies)])
        with self._refusing(f"it refuses {self.parts}"):
            names = whole.names(of_every_shape=self.grain == WHOLE)
            halves = (None,) if self.grain == WHOLE else (0, 1)
            ranks = [OnRank(inner, options, whole, names, self.grain, half) for half in halves]
        for step in range(steps):
            gradients = whole.gradients(step)
            whole.step(gradients)
            if step == 0:
                self.check_states(whole)
            names = whole.names(of_every_shape=self.grain == WHOLE)
            for rank in ranks:
                with self._refusing(f"a step over {self.parts} failed"):
                    rank.step(gradients, names)
                if (step + 1) % self.every == 0 or step + 1 == steps:
                    self._compare_values(whole, rank, f"within {step + 1} of {steps} steps")
        if inner.has_modes:
            names |= self._compare_modes(whole, ranks)
        kinds = self.check_states(whole)
        self.compare_states(whole, ranks, names)
        for rank in ranks:
            self._compare_options(whole, rank)
            if self.grain.alone:
                with self._refusing(
                    f"a step over no parameter failed, as a rank takes that owns none{whole.odd_key()}"
                ):
                    rank.step_nothing()
        return names, kinds

    def _compare_modes(self, whole: FullParameters, ranks: Sequence[OnRank]) -> frozenset[str]:
        """Let the class exchange the weights for those of an evaluation, and these for those of training. Compare.

        Returns the names of the states that are as large as the parameter in an evaluation."""
        names: frozenset[str] = frozenset()
        for mode in ("eval", "train"):
            whole.call(methodcaller(mode))
            for rank in ranks:
                with self._refusing(f"{mode}() over {self.parts} failed"):
                    rank.call(methodcaller(mode))
                self._compare_values(whole, rank, f"after {mode}()")
            names |= whole.names(of_every_shape=self.grain == WHOLE)
        return names

    def _compare_values(self, whole: FullParameters, rank: OnRank, when: str) -> None:
        """Raise `ValueError` if the parameters differ between those that were stepped whole and those on a rank."""
        for piece in rank.pieces:
            parameter = whole.parameters[piece.parameter]
            if not equal_values(piece.of(parameter), piece.values):
                random = "; it draws random numbers" if whole.draws else ""
                raise self.refusal(f"{self.other_bits.format(tuple(parameter.shape))} ({when}{random})")

    def _compare_options(self, whole: FullParameters, rank: OnRank) -> None:
        """Raise `ValueError` if options differ between whole parameters and those on a rank."""
        for mine, theirs in zip(whole.groups, rank.groups, strict=True):
            for name, value in mine.items():
                if not same(value, theirs.get(name)):
                    raise self.refusal(f"it changed option {name!r} differently for {self.parts} than for {self.full}")

    def compare_states(self, whole: FullParameters, ranks: Sequence[OnRank], large: frozenset[str]) -> None:
        """Raise `ValueError` if states differ between whole parameters and those on ranks.

        They may differ long before the parameters do, and they are saved in state dicts. ``large``: the names of the
        states that are as large as the parameter.
        """
        for on_rank, piece in ((rank, piece) for rank in ranks for piece in rank.pieces):
            state, other = whole.state(piece.parameter), on_rank.state(piece)
            for name in sorted(state.keys() | other.keys() if self.grain == WHOLE else state.keys() - large):
                if not same(state.get(name), other.get(name)):
                    raise self.refusal(f"its state {name!r} got another value for {self.parts} than for {self.full}")

    @contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        """Raise any error of the block as a refusal of the class."""
        try:
            yield
        except Exception as error:
            raise self.refusal(f"{what} ({error})") from error

    # -- of a partition -----------------------------------------------------------------------------------------------

    def refusal(self, why: str) -> ValueError:
        """Return the error of a class that differs."""
        raise NotImplementedError

    def choose(self, parameters: Sequence[ParameterSpec]) -> list[Placed]:
        """Choose the throw-away parameters."""
        raise NotImplementedError

    def stands_for(self, shape: tuple[int, ...], spec: ParameterSpec) -> bool:
        """Return whether throw-away parameters of this shape stand for one of the user's."""
        raise NotImplementedError

    def check_states(self, whole: FullParameters) -> dict[str, Rebuild]:
        """Raise `ValueError` for a state that ranks cannot keep. Return the tensor subclasses among states."""
        raise NotImplementedError


class ByElement(Trial):
    """Steps over pieces of parameters, as of ranks with ``partition="element"``.

    The throw-away parameters have every number of dimensions that the user's have, and those in `DIMENSIONS` that the
    class accepts. Learning rates below `RAISED_RATE` are first tried unchanged for `FEW_STEPS`. At last follow
    `FEW_STEPS` in which low weight decays are raised, too: fused Adam on CUDA rounds the decay in one of its loops
    otherwise than in the other.
    """

    grain = BY_ELEMENT
    every = 3
    parts, full = "shards", "full parameters"
    other_bits = "stepping shards of a parameter of shape {} gave different bits than stepping it whole"

    def steps(self) -> tuple[frozenset[str], dict[str, Rebuild]]:
        if self.any_is_low("lr"):
            self.compare_with([()], FEW_STEPS)
        found = super().steps()
        for names in (("lr", "weight_decay"), ("weight_decay",)) if self.any_is_low("weight_decay") else ():
            try:
                self.compare(*self.with_raised(names), FEW_STEPS)
                break
            except ClassFailedError:
                continue  # the class may refuse a higher rate alone
        return found

    def refusal(self, why: str) -> ValueError:
        return NotElementwiseError(self.inner.name, why)

    def choose(self, parameters: Sequence[ParameterSpec]) -> list[Placed]:
        return placed(self.settings, sorted(DIMENSIONS | {len(spec.shape) for spec in parameters}))

    def stands_for(self, shape: tuple[int, ...], spec: ParameterSpec) -> bool:
        return len(shape) == len(spec.shape)

    def check_states(self, whole: FullParameters) -> dict[str, Rebuild]:
        """Raise `ValueError` if a state is neither as large as its parameter nor a scalar: it cannot be cut."""
        for number, parameter in enumerate(whole.parameters):
            for name, value in whole.state(number).items():
                plain = not isinstance(value, Tensor) or type(value) in (Tensor, nn.Parameter)
                if not plain or (not is_elementwise(value, parameter) and not _is_scalar(value)):
                    of_shape = plain and isinstance(value, Tensor)
                    kind = f"has shape {tuple(value.shape)}" if of_shape else f"is a {type(value).__name__}"
                    raise self.refusal(
                        f"its state {name!r} {kind}, where the parameter has shape {tuple(parameter.shape)}"
                    )
        return {}


class ByParameter(Trial):
    """Steps over each parameter by itself, as of its owner with ``partition="parameter"``.

    The throw-away parameters have the user's shapes, with long sides shortened, and a larger one. They are stepped
    together by the class, and each alone.
    """

    grain = WHOLE
    copies = COPIES
    parts, full = "one parameter", "several"
    other_bits = "stepping a parameter of shape {} alone gave different bits than stepping it with others"

    def refusal(self, why: str) -> ValueError:
        return ValueError(
            f"{self.inner.name} cannot be sharded: {why}. A rank steps the parameters that it owns, each by itself and "
            "without a closure, so only classes whose step of a parameter depends on nothing but that parameter, its "
            "gradient and its state can be sharded: name another class"
        )

    def choose(self, parameters: Sequence[ParameterSpec]) -> list[Placed]:
        return [
            (setting, shape)
            for setting in self.settings
            for shape in sorted({*map(shortened, setting.shapes), *large_shapes(setting.shapes)})
        ]

    def stands_for(self, shape: tuple[int, ...], spec: ParameterSpec) -> bool:
        return shape in (shortened(spec.shape), *large_shapes([spec.shape]))

    def check_states(self, whole: FullParameters) -> dict[str, Rebuild]:
        """Raise `ValueError` for a tensor subclass that is not rebuilt as it was from what is sent and saved of it."""
        found: dict[str, Rebuild] = {}
        for number in range(len(whole.parameters)):
            for name, value in whole.state(number).items():
                own = kinds_in(value)
                if not own:
                    continue
                problem = f"its state {name!r} is another one when it is rebuilt by __tensor_unflatten__"
                try:
                    again = decode(*encode(value, f"its state {name!r}", wrappers=True), own)
                except (TypeError, FormatError) as error:
                    again, problem = None, str(error)
                if not same(value, again):
                    what = f"{self.inner.name} keeps states in {' and '.join(own)}, which cannot be saved"
                    raise ValueError(f"{what}: {problem}")
                found |= own
        return found


def _is_scalar(value: Any) -> bool:
    """Return True for a scalar, and for a list or tuple of nothing but scalars."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, (list, tuple)):
        return all(_is_scalar(inside) for inside in value)
    return value is None or isinstance(value, (numbers.Number, str))


def distinct(
    defaults: Options, groups: Sequence[Options], parameters: Sequence[ParameterSpec]
) -> tuple[list[Options], list[Setting]]:
    """Return the distinct options of groups, by the dtypes in these, and the settings in which parameters have them."""
    dtypes_of: dict[int, set[torch.dtype]] = {}  # by group
    for spec in parameters:
        dtypes_of.setdefault(spec.group, set()).add(spec.dtypes.step_dtype)
    numbers_of: dict[tuple[str, Any], int] = {}
    options: list[Options] = []
    number_of: dict[int, int] = {}  # by group
    for group in dict.fromkeys(spec.group for spec in parameters):
        given = {**defaults, **{key: value for key, value in groups[group].items() if key not in NO_OPTIONS}}
        number_of[group] = numbers_of.setdefault((_text_of(given), frozenset(dtypes_of[group])), len(options))
        if number_of[group] == len(options):
            options.append(given)
    shapes: dict[tuple[int, Dtypes, str], set[tuple[int, ...]]] = {}
    for spec in parameters:
        shapes.setdefault((number_of[spec.group], spec.dtypes, step_device(spec)), set()).add(spec.shape)
    settings = [
        Setting(number, dtypes, torch.device(device), tuple(sorted(found)))
        for (number, dtypes, device), found in shapes.items()
    ]
    return options, settings


def _raised(options: Options, names: Sequence[str]) -> Options:
    """Return those of ``names`` that are low, raised."""
    return {
        name: torch.full_like(options[name], RAISED_RATE) if isinstance(options[name], Tensor) else RAISED_RATE
        for name in names
        if _is_low(options, name)
    }


def _is_low(options: Options, name: str) -> bool:
    rate = options.get(name)
    if not isinstance(rate, (int, float, Tensor)) or (isinstance(rate, Tensor) and rate.numel() != 1):
        return False
    return bool(rate < RAISED_RATE) and (name == "lr" or bool(rate > 0))


def _text_of(value: Any) -> str:
    """Return a text that is equal for equal options, by which they are looked up. Other than plain values are equal to
    themselves alone."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {value.device} {value.tolist()}"
    if isinstance(value, dict):
        return str([(key, _text_of(inside)) for key, inside in value.items()])
    if isinstance(value, (list, tuple)):
        return str((type(value), [_text_of(inside) for inside in value]))
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return f"{type(value)} {id(value)}"


@contextmanager
def random_state_kept(settings: Sequence[Setting]) -> Iterator[None]:
    devices = list(dict.fromkeys(setting.device for setting in settings if setting.device.type not in ("cpu", "meta")))
    with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
        yield
