"""Mutants of parameters that have one owner each, and of the trial of classes that need them."""

from __future__ import annotations

from typing import Any

from .mutant import Edit, Mutant, Wrap

OWNERS = "core/test_owners.py"
PARTITION = "step/test_partition.py"
CLASSES = "step/test_classes.py"
AVERAGE = "state/test_average.py"
BITS = f"{PARTITION}::test_classes_that_need_whole_parameters_give_the_bits_of_the_plain_loop"

RESUMED = "state/test_strides.py::test_a_resumed_run_is_the_undisturbed_one"
UNDISTURBED = "state/test_strides.py::test_an_undisturbed_run_and_its_dict_are_those_of_the_plain_loop"


def sending_row_major(facts: Any) -> Any:
    return lambda tensor: facts(tensor)[:2]


def copying_row_major(copied: Any) -> Any:
    return lambda tensor: copied(tensor).contiguous()


MUTANTS = (
    Mutant(
        "states-are-sent-without-their-strides",
        ("L12",),
        "A dict of all ranks has eigenvectors row-major: training that goes on from it has other last bits.",
        (Wrap("zero.state.gather._facts", sending_row_major),),
        (f"{UNDISTURBED}[mixed]",),
    ),
    Mutant(
        "loaded-states-are-row-major",
        ("L12", "P45"),
        "Eigenvectors of a dict or of a checkpoint become row-major when they are loaded.",
        (Wrap("zero.core.bits.copied", copying_row_major),),
        (f"{RESUMED}[mixed-(3, 1)-dict]",),
    ),
    Mutant(
        "a-square-states-memory-order-is-its-parameters",
        ("L12",),
        "A state of its parameter's shape becomes row-major at the first step, whatever order its class has given it.",
        (
            Edit(
                "zero.runtime.flat_states.BucketStates.adopt_states",
                "                    and value.stride() == run.parameter.stride()\n",
                "",
            ),
        ),
        (f"{UNDISTURBED}[square]",),
    ),
    Mutant(
        "the-smallest-parameters-first",
        ("L7",),
        "Owners are chosen from the smallest parameter on: the largest one comes on top of an even load.",
        (Edit("zero.core.owners.choose_owners", "-parameter[1]", "parameter[1]"),),
        (f"{OWNERS}::test_the_largest_parameters_are_given_out_first",),
    ),
    Mutant(
        "one-rank-owns-every-parameter",
        ("L7",),
        "What a rank owns already does not count: one rank steps every parameter, and holds all states.",
        (Edit("zero.core.owners.choose_owners", "(held + nbytes, done + work, rank)", "(held, done, rank)"),),
        (f"{OWNERS}::test_no_rank_has_more_than_its_share_and_the_largest_parameter",),
    ),
    Mutant(
        "a-further-group-begins-at-rank-0",
        ("L7",),
        "Owners of a further group are chosen as if nobody owned anything: with a group for each layer rank 0 has all.",
        (Edit("zero.core.buckets._owners", "loads = layout.loads()", "loads: dict[int, tuple[int, int]] = {}"),),
        (f"{OWNERS}::test_parameters_that_are_added_go_to_those_who_have_least_and_move_nothing",),
    ),
    Mutant(
        "even-cuts-through-matrices",
        ("S44",),
        "Whole parameters are cut evenly: a matrix has two owners, and each steps a part of it.",
        (Edit("zero.core.buckets._bucket", "if not spec.whole:", "if True:"),),
        (f"{OWNERS}::test_cuts_fall_between_slots_which_lie_in_the_order_of_their_owners",),
    ),
    Mutant(
        "matrices-are-stepped-flat",
        ("S46",),
        "The class sees a whole parameter as a vector: its update is another one, without an error.",
        (
            Edit(
                "zero.runtime.flat_states.BucketStates._shape",
                "if self.whole or self.scalars[slot]",
                "if self.scalars[slot]",
            ),
        ),
        (f"{BITS}[0-shampoo]",),
    ),
    Mutant(
        "matrices-are-stepped-for-each-micro-batch",
        ("S45",),
        "The class steps a whole parameter twice in a step, as if for each of two micro-batches.",
        (
            Edit(
                "zero.step.inner._step",
                "        unhooked_step(states.instance)()\n",
                "        for _ in range(2 if states.whole else 1):\n            unhooked_step(states.instance)()\n",
            ),
        ),
        (f"{BITS}[0-shampoo]",),
    ),
    Mutant(
        "neighbours-are-stepped-as-one-matrix",
        ("S46",),
        "Neighbouring whole parameters form a run: the class steps the first one, and the others stay as they are.",
        (
            Edit(
                "zero.runtime.flat_states.BucketStates._joins",
                "        if self.whole:\n            return False\n",
                "",
            ),
        ),
        (f"{PARTITION}::test_matrices_give_the_bits_of_the_plain_loop[2-2-muon-dtype0]",),
    ),
    Mutant(
        "a-parameter-is-tried-alone",
        ("L12",),
        "The trial has one throw-away parameter of each shape: a class that looks at several of one shape is taken.",
        (Edit("zero.step.partition", "COPIES = 2 ", "COPIES = 1 "),),
        (f"{PARTITION}::test_others_of_the_same_shape_count",),
    ),
    Mutant(
        "a-trial-by-parameter-compares-no-options",
        ("L12",),
        "The trial compares no options: a class that estimates a rate over all parameters is taken.",
        (
            Edit(
                "zero.step.partition._compare",
                "    for number, (mine, theirs) in enumerate(zip(together.groups, alone.groups, strict=True)):\n",
                "    for number, (mine, theirs) in enumerate([({}, {})]):\n",
            ),
        ),
        (
            f"{PARTITION}::test_a_class_that_looks_at_more_than_a_parameter_is_an_error_that_says_why[None-EstimatesTogether]",
        ),
    ),
    Mutant(
        "a-preconditioner-counts-as-momentum",
        ("L12",),
        "A state that has the shape of a square parameter counts as one that is as large as any parameter.",
        (Edit("zero.step.partition._names", "found.get(name, True) and large", "found.get(name, False) or large"),),
        (f"{PARTITION}::test_states_that_are_as_large_as_their_parameter_have_the_names_of_all_shapes",),
    ),
    Mutant(
        "large-states-in-another-order",
        ("S46",),
        "The bytes of large states are taken from the end: a rank's preconditioners come back in each other's place.",
        (
            Edit(
                "zero.state.gather._StateFacts.states",
                "in large.items():",
                "in reversed(large.items()):",
            ),
        ),
        (f"{BITS}[0-shampoo]",),
    ),
    Mutant(
        "loaded-preconditioners-are-forgotten",
        ("L12",),
        "A load keeps only states that are as large as their parameter: the class begins its preconditioners anew.",
        (
            Edit(
                "zero.state.plain_dicts.scalar_state",
                "for inside in value])",
                "* 0 for inside in value])",
            ),
        ),
        (f"{PARTITION}::test_training_goes_on_from_a_dict_at_another_stage_and_number_of_ranks",),
    ),
    Mutant(
        "classes-share-a-bucket",
        ("L12",),
        "Parameters of two classes lie in one bucket, which the first one's class steps: the others stay as they are.",
        (Edit("zero.core.buckets._buckets", "spec.whole, spec.optimizer_class)", "spec.whole)"),),
        (f"{CLASSES}::test_two_element_wise_classes_share_no_bucket[0]",),
    ),
    Mutant(
        "a-group-has-the-options-of-both-classes",
        ("L12",),
        "A group whose class it names keeps the options of the other class, too: they are saved, and scheduled.",
        (Edit("zero.step.classes.InnerOptimizers.drop_foreign", "if KEY in completed:", "if KEY in given and False:"),),
        (f"{CLASSES}::test_groups_have_the_defaults_of_their_class_and_schedulers_move_all",),
    ),
    Mutant(
        "a-class-s-dict-has-the-indices-of-all",
        ("L12",),
        "The dict of each class keeps the indices of all parameters: torch's own class loads other parameters' states.",
        (Edit("zero.state.by_class.split", '_renumbered(whole["state"], indices)', 'dict(whole["state"])'),),
        (f"{CLASSES}::test_muon_for_matrices_and_adamw_for_the_rest_give_the_bits_of_the_plain_loop[2-2-dtype0]",),
    ),
    Mutant(
        "whole-numbers-lie-flat",
        ("L1",),
        "8-bit states of whole parameters become views of a flat tensor in the dtype of another parameter's states.",
        (
            Edit(
                "zero.runtime.flat_states.may_lie_flat",
                "type(value) in (Tensor, torch.nn.Parameter) and value.is_floating_point()",
                "True",
            ),
            Edit(
                "zero.runtime.flat_states.BucketStates.adopt_states",
                "                    and value.dtype == self.weights.dtype\n",
                "",
            ),
        ),
        (f"{PARTITION}::test_states_keep_their_dtype_beside_others_of_the_same_name[1-dict]",),
    ),
    Mutant(
        "only-small-parameters-are-tried",
        ("L10",),
        "The trial by parameter steps short sides alone: what a class does with large parameters together is not seen.",
        (Edit("zero.step.trial.large_shapes", "math.prod(sides) < LARGE", "True"),),
        (f"{PARTITION}::test_what_a_class_does_with_large_parameters_alone_is_tried",),
    ),
    Mutant(
        "tensors-in-lists-lie-in-the-json",
        ("L9",),
        "Every rank gets the values of all tensors that lie in lists of states, as text, and a large save fails.",
        (Edit("zero.core.statetree.encode_states", "if value.numel() <= 1}", "}"),),
        ("checkpoint/test_statetree.py::test_states_survive_with_their_large_tensors_beside_the_json",),
    ),
    Mutant(
        "an-owner-needs-no-more-scratch-than-others",
        ("L7",),
        "The bound of scratch memory counts a bucket, where an owner receives its slice of every other rank at once.",
        (Edit("zero.core.formulas.peak_bounds", "if is_whole else bucket.numel", "if False else bucket.numel"),),
        (
            "planning/test_planned_memory.py::test_a_rank_holds_and_sends_what_is_planned[sequential stage0 W8 F8 "
            "reshardTrue offload-none fp32 muon]",
        ),
    ),
    Mutant(
        "a-plan-counts-two-states-of-muon",
        ("L7",),
        "The plan gives the matrices of Muon the states of AdamW.",
        (
            Edit(
                "zero.planning.memory.MemoryPlan._of_bucket",
                "len(setting.classes) > 1 and members[0].is_unit_matrix",
                "0",
            ),
        ),
        (
            "planning/test_settings.py::test_so_they_are_where_matrices_have_one_owner_each_and_no_rank_has_more_than_a_"
            "share_and_a_matrix",
        ),
    ),
    Mutant(
        "an-average-is-one-of-rounded-weights",
        ("L1",),
        "With mixed precision the weights that the model computes with are averaged, not the master weights.",
        (
            Edit(
                "zero.state.average.ShardedAverage._weights",
                "bucket.states.synced_weights().detach()",
                "of.data.detach().to(bucket.spec.dtypes.master_dtype)",
            ),
        ),
        (f"{AVERAGE}::test_with_mixed_precision_it_is_that_of_the_master_weights[2]",),
    ),
    Mutant(
        "a-restored-average-begins-anew",
        ("L9",),
        "A restored average has its values, but counts as new: the next update replaces it by the weights.",
        (Edit("zero.checkpoint.read.loader.Loader.load", "int(self._checkpoint.read(*saved))", "0"),),
        (
            f"{AVERAGE}::test_checkpoints_have_it_and_training_goes_on_at_another_stage_and_number_of_ranks[after0-before0]",
        ),
    ),
    Mutant(
        "the-model-keeps-the-average",
        ("L1",),
        "After a block in which the model computes with the average, it trains on from the average.",
        (Edit("zero.state.average.Averages.applied", "self._replace_weights(kept, purpose)", "pass"),),
        (f"{AVERAGE}::test_the_model_computes_with_it_inside_a_block_and_trains_on_as_if_there_had_been_none[1-None]",),
    ),
    Mutant(
        "an-average-forgets-scalars",
        ("L1",),
        "The average of a parameter without dimensions is kept, but not updated.",
        (Edit("zero.state.average._pieces", "if piece.numel]", "if piece.numel > 1]"),),
        (f"{AVERAGE}::test_the_average_is_that_of_the_plain_loop[1-mean]",),
    ),
    Mutant(
        "parameters-that-no-average-has-seen-are-saved-as-they-lie-in-memory",
        ("L9",),
        "A save of an average writes unfilled memory for parameters that were added since its last update.",
        (
            Edit(
                "zero.state.average.ShardedAverage.values",
                "self.room(bucket).data.copy_(self._weights(bucket).data)",
                "self.room(bucket).data.fill_(7)",
            ),
        ),
        (f"{AVERAGE}::test_params_that_are_added_later_have_their_weights_until_the_next_update[1]",),
    ),
)
