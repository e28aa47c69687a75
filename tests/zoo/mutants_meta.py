"""Mutants of models that were built without memory."""

from __future__ import annotations

from .mutant import Edit, Mutant

TESTS = "parameters/test_meta.py"
SEED = f"{TESTS}::test_one_seed_gives_the_bits_of_plain_construction"
SHARDS = f"{TESTS}::test_at_stage_3_what_came_before_is_sharded_when_a_module_gets_memory"
READ = f"{TESTS}::test_a_state_dict_is_read_tensor_by_tensor_in_order_of_registration[1]"

MUTANTS = (
    Mutant(
        "modules-get-values-from-the-last",
        ("L19",),
        "One seed gives other weights than plain construction: modules draw in another order.",
        (
            Edit(
                "zero.parameters.materialize.Materializer._one_by_one",
                "self._materialize(self._without_memory.pop(0))",
                "self._materialize(self._without_memory.pop())",
            ),
        ),
        (f"{SEED}[1-False-1]",),
    ),
    Mutant(
        "a-whole-model-gets-memory-first",
        ("P27", "L19"),
        "All modules get memory before the first bucket is sharded: a rank holds the whole model.",
        (
            Edit(
                "zero.parameters.sharded.ShardedStorage._in_registration_order",
                "            while any(map(is_meta, requests[place].parameters)):\n                next(steps)\n",
                "            for _ in steps:\n                pass\n",
            ),
        ),
        (f"{SHARDS}[all]",),
    ),
    Mutant(
        "what-is-not-trained-is-sharded-last",
        ("P27",),
        "The frozen base of an adapted model is whole until what is trained has been sharded.",
        (
            Edit(
                "zero.parameters.sharded.ShardedStorage._fill",
                "        stored = self._fill_all([*new, *self._lay_out_rest()])\n",
                "        stored = [*self._fill_all(new), *self._fill_all(self._lay_out_rest())]\n",
            ),
        ),
        (f"{SHARDS}[last]",),
    ),
    Mutant(
        "what-a-state-dict-misses-is-drawn",
        ("L19",),
        "A state dict with other names than the model's leaves it untrained, and nobody notices (S61 of construction).",
        (
            Edit(
                "zero.parameters.materialize._check_keys",
                "    if may_miss:\n",
                "    if may_miss or given is not None:\n",
            ),
        ),
        (f"{TESTS}::test_a_state_dict_has_what_the_model_has_unless_a_function_says_what_is_missing",),
    ),
    Mutant(
        "values-are-read-and-then-drawn",
        ("L19",),
        "A module's own initialisation comes after what was read for it.",
        (
            Edit(
                "zero.parameters.materialize.Materializer._materialize",
                "                    self._read(own)\n                    if self._given_as",
                "                    self._read(own)\n"
                "                    self._initialize(part, frozenset(id(entry.tensor) for entry in fresh))\n"
                "                    if self._given_as",
            ),
        ),
        (READ,),
    ),
    Mutant(
        "what-has-values-is-drawn-again",
        ("S50", "L19"),
        "A tie gets the values of the last module that has it, and what never was on the meta device is overwritten.",
        (
            Edit(
                "zero.parameters.materialize.Materializer._initialize",
                "                own.registry[own.key] = self._temporary_copy(own)\n",
                "                pass\n",
            ),
        ),
        (f"{TESTS}::test_what_a_module_draws_leaves_alone_what_has_values[25.0-1]",),
    ),
    Mutant(
        "a-tie-is-untied-by-its-memory",
        ("S50", "L19"),
        "Where memory comes, the second of two tied parameters is told apart from the first, and read as missing.",
        (
            Edit(
                "zero.core.names.named_tensors",
                "    yield from named_parameters(module, remove_duplicate=False)\n",
                "    yield from named_parameters(module)\n",
            ),
        ),
        (f"{TESTS}::test_a_tie_is_found_by_either_of_its_names[last.weight-1]",),
    ),
)
