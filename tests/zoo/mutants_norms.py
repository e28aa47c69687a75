"""Mutants of the norm and of clipping."""

from __future__ import annotations

from .mutant import Edit, Mutant

CLIPPING = "contract/test_exact.py::test_clipping_is_that_of_the_plain_loop_for_every_norm"

MUTANTS = (
    Mutant(
        "stage-0-returns-the-norm-and-does-not-clip",
        ("S28",),
        "Where every rank holds whole gradients, the factor is computed and not applied.",
        (
            Edit(
                "zero.step.update.Update.clip",
                "        if not bool(factor == 1.0):\n",
                "        if not bool(factor == 1.0) and not self._stage.grads_replicated:\n",
            ),
        ),
        (f"{CLIPPING}[0-2.0]",),
    ),
    Mutant(
        "small-gradients-are-scaled-up",
        ("S28",),
        "The clip factor is not bounded by 1: gradients below the limit grow to it.",
        (
            Edit(
                "zero.step.clip.clip_factor",
                "torch.clamp(max_norm / (norm + 1e-6), max=1.0)",
                "max_norm / (norm + 1e-6)",
            ),
        ),
        ("core/test_norm.py::test_the_clip_factor_is_torchs",),
    ),
    Mutant(
        "the-norm-of-the-first-bucket",
        ("S29",),
        "The norm covers the first bucket that has a gradient, so that it depends on the bucket size.",
        (
            Edit(
                "zero.gradients.owned_means.OwnedMeans._intervals",
                "            if gradient is not None:\n",
                "            if gradient is not None and not found:\n",
            ),
        ),
        (f"{CLIPPING}[2-2.0]",),
    ),
    Mutant(
        "the-infinity-norm-is-one",
        ("S30",),
        "The largest magnitude is raised to 1/inf, which is 1.",
        (
            Edit(
                "zero.core.norm.PowerSum._root",
                "if self.norm_type in (1.0, math.inf):\n                return",
                "if self.norm_type == 1.0:\n                return",
            ),
        ),
        ("core/test_norm.py::test_it_agrees_with_torch_in_fp64",),
    ),
    Mutant(
        "the-norm-of-this-rank",
        ("S31",),
        "Each rank clips by the norm of its own slices.",
        (
            Edit(
                "zero.step.update.Update.clip",
                "        norm = total.norm(",
                "        norm = PowerSum.from_bytes(parts[self._transport.rank]).norm(",
            ),
        ),
        (f"{CLIPPING}[2-2.0]",),
    ),
    Mutant(
        "tied-parameters-count-twice-in-the-norm",
        ("S32",),
        "A parameter with two names is added to the norm once for each.",
        (
            Edit(
                "zero.gradients.owned_means.OwnedMeans._intervals",
                "                    found.append(gradient.interval(begin, end))\n",
                "                    found.append(gradient.interval(begin, end))\n"
                "                for piece in pieces_of(bucket):\n"
                "                    ties = bucket.specs[piece.slot].names[1:] if bucket.used[piece.slot] else ()\n"
                "                    found += [gradient.piece(piece)] * len(ties)\n",
            ),
        ),
        (f"{CLIPPING}[2-2.0]",),
    ),
    Mutant(
        "replicas-count-once-a-rank",
        ("S33",),
        "At stage 0 every rank adds the whole gradient to the norm, which grows by sqrt(W).",
        (
            Edit(
                "zero.gradients.owned_means.OwnedMeans.slices",
                "lambda bucket: bucket.grad.pieces",
                "lambda bucket: bucket.states.pieces",
            ),
        ),
        (f"{CLIPPING}[0-2.0]",),
    ),
    Mutant(
        "a-rank-without-gradients-returns-at-once",
        ("R7",),
        "A rank that owns no used piece returns a norm of 0 before the exchange, in which the others wait for it.",
        (
            Edit(
                "zero.step.update.Update.clip",
                "        if parts is None:\n",
                "        if not self._means.slices():\n            return torch.zeros(())\n        if parts is None:\n",
            ),
        ),
        ("core/test_norm.py::test_a_rank_that_owns_nothing_takes_part[2]",),
    ),
    Mutant(
        "norms-are-added-instead-of-squares",
        ("R7",),
        "The ranks' norms are added up, not their sums of squares.",
        (
            Edit(
                "zero.step.update.Update.clip",
                "        norm = total.norm(torch.float64 if self._means.any_is_double() else torch.float32)\n",
                "        dtype = torch.float64 if self._means.any_is_double() else torch.float32\n"
                "        norm = torch.stack([PowerSum.from_bytes(data).norm(dtype) for data in parts]).sum()\n",
            ),
        ),
        (f"{CLIPPING}[2-2.0]",),
    ),
    Mutant(
        "padding-counts-in-the-norm",
        ("R14",),
        "The norm runs over whole slices, with the uninitialised memory between the parameters.",
        (
            Edit(
                "zero.gradients.owned_means.OwnedMeans._intervals",
                "                    found.append(gradient.interval(begin, end))\n",
                "                    whole = gradient.data\n"
                "                    found[-1:] = [*(p for p in found[-1:] if p is not whole), whole]\n",
            ),
        ),
        ("contract/test_steps.py::test_padding_and_scratch_cannot_be_observed[2]",),
    ),
    Mutant(
        "a-naive-sum-of-squares",
        ("L1",),
        "Squares are added in fp64 as they come: the norm depends on where the slices are cut.",
        (
            Edit(
                "zero.core.norm._Reader._drain",
                "        self._units += _exact_sum(sums)\n",
                "        self._units += _in_units(sums.sum().item())\n",
            ),
        ),
        ("core/test_norm.py::test_no_cut_no_order_and_no_grouping_changes_the_partial",),
    ),
)
