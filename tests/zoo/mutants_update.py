"""Mutants of the update: the optimizer class, its options, and the pieces that it steps."""

from __future__ import annotations

from .mutant import Edit, Mutant

EXACT = "contract/test_exact.py::test_every_class_and_path_gives_the_bits_of_the_plain_loop"

MUTANTS = (
    Mutant(
        "a-reading-offset-is-lost-after-the-first-step",
        ("S17",),
        "From the second step on a run reads its gradient from the beginning of the bucket's slice.",
        (
            Edit(
                "zero.step.inner._step",
                "        run.parameter.grad = run.of(wide)\n",
                "        run.parameter.grad = run.of(wide.roll(run.begin) if run.views else wide)\n",
            ),
        ),
        (f"{EXACT}[2-adamw]",),
    ),
    Mutant(
        "a-fake-step-makes-the-state",
        ("S40",),
        "Construction takes a step with zero gradients and no learning rate: Adam's count is 1 too high ever after.",
        (
            Edit(
                "zero.step.inner.InnerOptimizer.begin",
                "        if not self._begins_with_state:\n            return\n",
                "",
            ),
            Edit(
                "zero.step.inner.InnerOptimizer.begin",
                "            built = self._class(_param_groups(states, groups), **self._arguments)\n",
                "            still = [{**group, 'lr': 0.0} for group in _param_groups(states, groups)]\n"
                "            built = self._class(still, **self._arguments)\n"
                "            for run in states.runs:\n"
                "                run.parameter.grad = torch.zeros_like(run.parameter)\n"
                "            unhooked_step(built)()\n",
            ),
        ),
        ("state/test_saving.py::test_before_the_first_step_there_is_no_state[2]",),
    ),
    Mutant(
        "every-rank-steps-the-first-slice",
        ("S41",),
        "Each rank steps the values of rank 0's slice with the gradients of its own: only a fraction is trained.",
        (
            Edit(
                "zero.runtime.bucket.StoredBucket.updated_weights",
                "        return self.weights.shard(self.spec.cuts, rank)\n",
                "        return self.weights.shard(self.spec.cuts, 0)\n",
            ),
        ),
        (f"{EXACT}[2-sgd]",),
    ),
    Mutant(
        "the-last-slice-is-never-updated",
        ("S42",),
        "The last piece of a bucket is left out of every step.",
        (
            Edit(
                "zero.runtime.flat_states.BucketStates.plan",
                "in runs(self.pieces, present, self._joins):",
                "in runs(self.pieces[: len(self.pieces) - (self.end == self.bucket.numel)], present, self._joins):",
            ),
        ),
        (f"{EXACT}[2-sgd]",),
    ),
    Mutant(
        "the-first-step-updates-nothing",
        ("S43",),
        "The first step only warms up.",
        (
            Edit(
                "zero.step.update.Update.step",
                "        buckets = self._storage.buckets\n",
                "        if not hasattr(self, '_warm'):\n            self._warm = True\n            return {}\n"
                "        buckets = self._storage.buckets\n",
            ),
        ),
        (f"{EXACT}[2-sgd]",),
    ),
    Mutant(
        "any-class-is-taken-for-element-wise",
        ("L12",),
        "A class that looks at whole matrices, such as Muon, is run on flat pieces of them.",
        (
            Edit(
                "zero.step.trial.Trial.compare",
                "                    if not equal_values(piece.of(parameter), piece.values):\n",
                "                    if piece.values.dtype is not parameter.dtype:\n",
            ),
        ),
        ("test_errors.py::test_an_optimizer_class_that_is_not_element_wise",),
    ),
    Mutant(
        "another-optimizer-than-was-asked-for",
        ("S48",),
        "`fused=True` is dropped in silence, and the loop's other roundings are taken.",
        (
            Edit(
                "zero.step.inner._param_groups",
                '        result.append({**options, "params": runs})\n',
                '        result.append({**options, "params": runs, **({"fused": False} if "fused" in '
                "options else {})})\n",
            ),
        ),
        (f"{EXACT}[2-adamw fused]",),
    ),
    Mutant(
        "all-parameters-of-the-module-are-optimized",
        ("S49",),
        "Where a subset was given with its module, the whole module is trained.",
        (
            Edit(
                "zero.optimizer.ZeroOptimizer.__init__",
                "        groups = as_groups(params)\n",
                "        groups = as_groups(params if module is None else module)\n",
            ),
        ),
        ("parameters/test_stage3_edits.py::test_parameters_that_are_not_listed_are_edited_alike",),
    ),
    Mutant(
        "ties-are-cut",
        ("S50",),
        "The second place of a tied parameter gets a copy of its own, which nobody updates.",
        (
            Edit(
                "zero.parameters.storage.ParameterStorage._end",
                "        self._bindings = bindings(self._module)\n        self._cast_rest()",
                "        first: set[int] = set()\n"
                "        for bound in bindings(self._module):\n"
                "            if id(bound.parameter) in first:\n"
                "                bound.registry[bound.key] = nn.Parameter(bound.parameter.detach().clone())\n"
                "            first.add(id(bound.parameter))\n"
                "        self._bindings = bindings(self._module)\n"
                "        self._cast_rest()",
            ),
        ),
        ("contract/test_public_calls.py::test_identity_names_ties_shapes_and_strides_stay[2]",),
    ),
    Mutant(
        "none-is-zero",
        ("L11",),
        "A parameter that nobody used is stepped with a gradient of zero: it decays, and its steps are counted.",
        (
            Edit(
                "zero.step.update.Update.step",
                "bytes([bucket.used[piece.slot] for piece in bucket.states.pieces])",
                "bytes([bucket.grad.final_grad() is not None for piece in bucket.states.pieces])",
            ),
        ),
        (f"{EXACT}[2-adamw]",),
    ),
    Mutant(
        "neighbours-share-a-step-count",
        ("L11",),
        "Pieces are stepped as one although one of them was left out before: it gets its neighbour's count.",
        (
            Edit(
                "zero.runtime.flat_states.BucketStates._joins",
                "        equal = state is None if before is None else before.same(state)\n",
                "        equal = (state is None) == (before is None)\n",
            ),
        ),
        ("state/test_saving.py::test_a_parameter_that_was_left_out_of_a_step_keeps_its_own_count[2]",),
    ),
    Mutant(
        "neighbours-share-a-group",
        ("L12",),
        "Pieces of two param groups are stepped as one, with the options of the first.",
        (
            Edit(
                "zero.core.runs.adjoins",
                "before.end == piece.begin and groups[index - 1] == groups[index]",
                "before.end == piece.begin",
            ),
        ),
        ("contract/test_public_calls.py::test_groups_schedulers_hooks_and_closures_work_as_in_torch[2]",),
    ),
    Mutant(
        "options-are-read-once",
        ("L12",),
        "The learning rate of construction is used for good: schedulers and edits of groups are not honoured.",
        (
            Edit(
                "zero.step.inner.InnerOptimizer.step",
                "        ahead = (update.states for",
                "        self._kept = getattr(self, '_kept', None) or copy.deepcopy([{**g, 'params': []} for g "
                "in groups])\n"
                "        groups = self._kept\n        ahead = (update.states for",
            ),
        ),
        ("contract/test_public_calls.py::test_groups_schedulers_hooks_and_closures_work_as_in_torch[2]",),
    ),
    Mutant(
        "what-a-class-counts-in-its-group-is-lost",
        ("L12",),
        "A class that keeps a number in its group finds the old one at each step.",
        (
            Edit(
                "zero.engine.Engine._agree_and_update",
                "        for number, options in changed.items():\n            groups[number].update(options)\n",
                "        for options in changed.values():\n",
            ),
        ),
        (
            "contract/test_public_calls.py::test_a_class_counts_steps_also_on_ranks_and_in_groups_that_hold_nothing[Counting-2]",
        ),
    ),
    Mutant(
        "a-scalar-is-a-vector",
        ("L12",),
        "A parameter without dimensions is stepped as a vector of one element, which torch promotes in another way.",
        (
            Edit(
                "zero.runtime.flat_states.BucketStates._shape",
                "if self.whole or self.scalars[slot] else",
                "if self.whole else",
            ),
        ),
        ("contract/test_public_calls.py::test_parameters_without_dimensions_are_promoted_as_torch_promotes_them",),
    ),
)
