"""Mutants of parameters without a place in a layout: frozen ones stay whole on every rank, trained ones are refused."""

from __future__ import annotations

from .mutant import Edit, Mutant

TESTS = "parameters/test_frozen.py"
QLORA = f"{TESTS}::test_a_quantised_base_with_adapters_trains_the_plain_loops_bits"
COMPARED = f"{TESTS}::test_whatever_says_what_it_holds_is_compared"
REFUSED = f"{TESTS}::test_what_cannot_be_trained_is_named_on_every_rank_with_a_remedy"

MUTANTS = (
    Mutant(
        "rank-0s-bytes-beside-a-ranks-own-scales",
        ("L10",),
        "A frozen subclass with memory of its own gets rank 0's bytes, which its own scales do not fit.",
        (
            Edit(
                "zero.core.parameter_specs.is_copied",
                "    return is_laid_out(parameter) or type(parameter) in _PLAIN\n",
                "    return is_laid_out(parameter) or not has_own_dispatch(parameter)\n",
            ),
        ),
        (f"{COMPARED}[2-packed-False]",),
    ),
    Mutant(
        "quantised-ones-keep-each-ranks-values",
        ("L10",),
        "At stage 3 what is not sharded is not copied from rank 0 either: ranks train over different bases.",
        (Edit("zero.parameters.sharded.ShardedStorage._end", "        self._copy(self.replicas())\n", ""),),
        (f"{QLORA}[3-fp32]",),
    ),
    Mutant(
        "casts-reach-quantised-weights",
        ("L15",),
        "Mixed precision casts whatever has a float dtype: packed numbers become others.",
        (
            Edit(
                "zero.parameters.casting.cast",
                "        if is_laid_out(tensor) and tensor.dtype is not dtype:\n",
                "        if tensor.dtype in FLOATS and tensor.dtype is not dtype:\n",
            ),
        ),
        (f"{QLORA}[2-bf16]",),
    ),
    Mutant(
        "a-trained-subclass-is-never-updated",
        ("L2",),
        "A trained wrapper subclass is taken for a frozen one: it keeps its first values, and nobody is told.",
        (
            Edit(
                "zero.core.parameter_specs._check",
                "    if parameter.requires_grad and not is_laid_out(parameter):\n",
                "    if parameter.requires_grad and not is_laid_out(parameter) and not has_own_dispatch(parameter):\n",
            ),
        ),
        (f"{REFUSED}[2-wrapper]",),
    ),
    Mutant(
        "an-unfrozen-quantised-weight-is-never-updated",
        ("L2", "L4"),
        "What was quantised and is trained now gets gradients, and no step uses them.",
        (
            Edit(
                "zero.parameters.storage.ParameterStorage.diagnose_unfrozen",
                "            if parameter.requires_grad:\n",
                "            if parameter.grad_fn is not None:\n",
            ),
        ),
        (f"{TESTS}::test_one_that_is_unfrozen_later_is_an_error_on_every_rank_until_it_is_frozen_again[2]",),
    ),
    Mutant(
        "states-leave-out-what-is-replicated",
        ("L12",),
        "A saved dict lists the parameters in buckets alone, so that the plain class over all parameters refuses it.",
        (
            Edit(
                "zero.state.plain_dicts.PlainDicts.dict_of",
                "packed_groups(groups, self._storage.listed())",
                "packed_groups(groups, self._storage.layout.parameters)",
            ),
        ),
        (f"{TESTS}::test_states_are_those_of_the_plain_class_over_all_parameters[2]",),
    ),
    Mutant(
        "a-further-group-is-numbered-among-buckets",
        ("L12",),
        "A further group is numbered after the parameters in buckets: two parameters have one index in a saved dict.",
        (
            Edit(
                "zero.setup._describe",
                '    known = sum(len(group["params"]) for group in all_groups[:first])\n',
                "    known = len(storage.parameters)\n",
            ),
        ),
        (f"{TESTS}::test_a_list_or_a_group_may_hold_what_is_replicated[2-True]",),
    ),
    Mutant(
        "a-further-group-has-numbers-for-names",
        ("L12",),
        "A group that was added without names is saved under numbers, though the module has names for it.",
        (
            Edit(
                "zero.core.parameter_specs.with_names",
                '    return [(names.get(id(entry), f"parameter {index}"), entry) for index, entry in numbered]\n',
                '    return [(names.get(index, f"parameter {index}"), entry) for index, entry in numbered]\n',
            ),
        ),
        (f"{TESTS}::test_at_stage_3_a_group_without_names_is_taken_where_the_module_has_it",),
    ),
)
