"""Mutants of what users do with param groups, states and gradients as with plain objects, and of classes whose
constructors or states are their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .mutant import Mutant, Wrap

CLASSES = "step/test_classes.py"
LISTS = "step/test_param_lists.py::test_an_edited_list_is_an_error_on_every_rank_and_nothing_changes"
STATES = "state/test_live_states.py"
RESET = f"{STATES}::test_states_that_are_reset_begin_anew_as_in_the_plain_loop"
WRAPPED = "step/test_wrapped_states.py"
GRADIENTS = "gradients/test_gradients.py"


def no_arguments(_: Any) -> Callable[..., Any]:
    return lambda optimizer_class, options: {}


def no_difference(_: Any) -> Callable[..., Any]:
    return lambda *_: None


def as_given(_: Any) -> Callable[..., Any]:
    return lambda inner, given: {**inner.defaults, **given}


def in_any_order(_: Any) -> Callable[..., Any]:
    return lambda now, before: isinstance(now, (list, tuple)) and {*map(id, now)} == {*map(id, before)}


def of_the_first_alone(forget: Any) -> Callable[..., Any]:
    return lambda storage, inners, groups, indices: forget(storage, inners, groups, indices[:1])


def of_all_pieces(begin: Any) -> Callable[..., Any]:
    return lambda inner, states, groups, new=None: begin(inner, states, groups)


def shared(_: Any) -> Callable[..., Any]:
    return lambda states, piece: states.state_of(piece)


def accepted(_: Any) -> Callable[..., Any]:
    return dict.__setitem__


def unwatched(make: Any) -> Callable[..., Any]:
    return lambda states, storage, watchers: make(states, storage, [])


def nowhere_else(_: Any) -> Callable[..., Any]:
    return lambda bucket: []


def taken(data: Any) -> Any:
    import torch

    return property(data.fget, lambda gradient, value: torch.Tensor.data.__set__(gradient, value))  # type: ignore[attr-defined]


def none_large(_: Any) -> Callable[..., Any]:
    return lambda shapes: []


def of_one_type(_: Any) -> Callable[..., Any]:
    return lambda one, other: type(one) is type(other)


def doubled(decode: Any) -> Callable[..., Any]:
    def wrong(content: Any, tensors: Any, kinds: Any) -> Any:
        found = decode(content, tensors, kinds)
        found.scale = found.scale * 2
        return found

    return wrong


MUTANTS = (
    Mutant(
        "arguments-of-a-constructor-are-options-alone",
        ("L12", "S48"),
        "What a param group gives its class for the constructor alone is ignored: Adagrad begins at 0.",
        (Wrap("zero.step.arguments.arguments_of", no_arguments),),
        (f"{CLASSES}::test_what_a_group_gives_its_class_reaches_the_constructor[1-Scaled]",),
    ),
    Mutant(
        "the-first-value-of-an-argument-holds-for-all-groups",
        ("L12",),
        "Two groups give their class two values of an argument of its constructor, and the first is taken for both.",
        (Wrap("zero.step.arguments.different_argument", no_difference),),
        (f"{CLASSES}::test_two_values_of_an_argument_that_the_constructor_uses_are_an_error[AdamW]",),
    ),
    Mutant(
        "options-keep-the-kind-in-which-they-were-given",
        ("L12",),
        "A learning rate that the class makes a tensor of stays a number, which the class refuses.",
        (Wrap("zero.step.inner.InnerOptimizer.options_of", as_given),),
        (f"{WRAPPED}::test_a_schedule_moves_a_learning_rate_that_the_class_keeps_as_a_tensor",),
    ),
    Mutant(
        "edited-lists-of-parameters-are-ignored",
        ("L12", "S49"),
        "A parameter that a user takes out of its param group, or puts into another, is trained on as before.",
        (Wrap("zero.step.param_lists.ParamLists.changed", no_difference),),
        (f"{LISTS}[3-filter]",),
    ),
    Mutant(
        "lists-of-parameters-are-compared-as-sets",
        ("L12",),
        "A list of parameters in another order is taken for the same: states follow the order of construction.",
        (Wrap("zero.step.param_lists._same", in_any_order),),
        (f"{LISTS}[2-reverse]",),
    ),
    Mutant(
        "one-state-of-several-is-forgotten",
        ("L12",),
        "`reset_states` of several parameters forgets the states of one, and the moments of the others stay.",
        (Wrap("zero.state.resets.forget_states", of_the_first_alone),),
        (f"{RESET}[0-adamw]",),
    ),
    Mutant(
        "a-constructor-makes-all-states-anew",
        ("L12",),
        "Where the class makes its states in the constructor, `reset_states` of some parameters resets all.",
        (Wrap("zero.step.inner.InnerOptimizer.begin", of_all_pieces),),
        (f"{RESET}[1-adagrad]",),
    ),
    Mutant(
        "neighbours-share-a-count-that-is-edited",
        ("L13",),
        "The step count of a parameter that a user edits in place is that of all that are stepped with it.",
        (Wrap("zero.runtime.flat_states.BucketStates.own_state", shared),),
        (f"{STATES}::test_edits_in_place_are_those_of_the_plain_loop_also_of_one_parameters_count[0-4]",),
    ),
    Mutant(
        "an-assigned-state-is-ignored",
        ("L13",),
        "A tensor that is assigned to a name of a parameter's states is accepted, and training goes on without it.",
        (Wrap("zero.state.live_states.ParameterStates.__setitem__", accepted),),
        (f"{STATES}::test_every_write_but_an_edit_in_place_is_an_error_that_names_the_ways_that_work[0]",),
    ),
    Mutant(
        "an-edit-of-a-state-reaches-a-save-under-way",
        ("S69", "L13"),
        "States that are edited in place while a save goes on are saved as they are then, in parts.",
        (Wrap("zero.state.live_states.States.__init__", unwatched),),
        ("checkpoint/test_snapshot.py::test_whatever_follows_changes_nothing_of_a_save[states edited-2]",),
    ),
    Mutant(
        "a-mean-with-other-memory-is-ignored",
        ("L2", "L13"),
        "A gradient of stage 0 whose `.data` is assigned is accepted, and the step uses the mean.",
        (Wrap("zero.gradients.grad_slots._elsewhere", nowhere_else),),
        (f"{GRADIENTS}::test_stage_0_refuses_a_mean_with_other_memory_until_it_is_cleared[none-clip-data]",),
    ),
    Mutant(
        "a-placeholder-takes-data",
        ("L2", "L13"),
        "An assignment to `p.grad.data` is accepted where the rank has no gradient, and ignored.",
        (Wrap("zero.gradients.hooks.ShardedGradient.data", taken),),
        (f"{GRADIENTS}::test_every_read_of_a_sharded_gradient_raises_and_names_the_remedy[assign data-1]",),
    ),
    Mutant(
        "no-parameter-of-whole-blocks-is-tried",
        ("L12", "S47"),
        "A class whose states have a scale for each block passes for element-wise, and has wide states in pieces.",
        (Wrap("zero.step.trial.large_shapes", none_large),),
        (f"{WRAPPED}::test_ranks_never_step_pieces_of_a_parameter_that_the_class_has_in_blocks[shape2]",),
    ),
    Mutant(
        "states-of-one-type-are-equal",
        ("L12",),
        "The trial of a class compares the types of its states, and not their bits.",
        (Wrap("zero.step.equality.same", of_one_type),),
        ("step/test_partition.py::test_the_trial_compares_bits_of_states_and_makes_no_text_of_them",),
    ),
    Mutant(
        "a-rebuilt-subclass-has-other-scales",
        ("S57",),
        "A tensor subclass among states comes back with scales that are twice as large.",
        (Wrap("zero.core.statetree._decode_subclass", doubled),),
        ("checkpoint/test_statetree.py::test_a_tensor_subclass_is_rebuilt_by_its_class_from_what_it_wraps",),
    ),
)
