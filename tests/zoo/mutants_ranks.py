"""Mutants of communication: waits, buffers, the order of launches, ranks and groups, agreement, bytes."""

from __future__ import annotations

from .mutant import Edit, Mutant

TREE = "collectives/test_control_plane.py"
BROADCAST = "collectives/test_broadcast.py"
EXACT = "contract/test_exact.py::test_every_class_and_path_gives_the_bits_of_the_plain_loop"
DIFFERENT = "test_errors.py::test_ranks_that_built_different_models_learn_the_first_difference"

WAITS = (
    Mutant(
        "a-block-in-use-is-handed-out",
        ("S18",),
        "Scratch memory that a transfer still holds counts as free: two contributions arrive in one buffer.",
        (Edit("collectives.pool._Block.free", "return _uses(self.storage) == 1", "return _uses(self.storage) >= 1"),),
        (f"{EXACT}[2-sgd]",),
    ),
    Mutant(
        "one-source-of-several-is-waited-for",
        ("S19",),
        "The owner waits for the first of the other ranks and adds up what the others' buffers hold by then.",
        (
            Edit(
                "collectives.algorithms.pairwise._PairwiseReduceScatter.wait",
                "            recvs.wait()\n",
                "            for work in list(recvs._works)[:1]:\n                work.wait()\n",
            ),
        ),
        (f"{EXACT}[2-sgd]",),
    ),
    Mutant(
        "a-bucket-is-launched-one-gradient-early",
        ("S20",),
        "A bucket leaves before its last gradient is there, which is lost.",
        (
            Edit(
                "zero.gradients.reducer.Reducer.gradient_ready",
                "        if not bucket.missing:\n",
                "        if bucket.missing <= 1:\n",
            ),
        ),
        (f"{EXACT}[2-sgd]",),
    ),
    Mutant(
        "means-are-read-while-they-travel",
        ("S22",),
        "Stage 0 shows means whose gather nobody waits for: what is read depends on how fast it comes.",
        (
            Edit(
                "zero.gradients.reducer.Reducer._gather_means", "for grad in summed).wait()\n", "for grad in summed)\n"
            ),
        ),
        ("gradients/test_gradients.py::test_stage_0_shows_the_mean_gradient_after_each_backward",),
    ),
    Mutant(
        "one-request-fewer-is-waited-for",
        ("S24",),
        "Of several transfers the last one is not waited for.",
        (
            Edit(
                "collectives.messages.Chain.wait",
                "        while self._works:\n",
                "        while len(self._works) > 1:\n",
            ),
        ),
        ("collectives/test_collectives.py::test_direct_exchanges_may_be_waited_for_in_any_order", f"{EXACT}[2-sgd]"),
    ),
    Mutant(
        "the-gather-after-the-step-is-not-waited-for",
        ("L5",),
        "The next forward reads parameters that are still on their way from their owners.",
        (
            Edit(
                "zero.step.update.Update.step",
                "        queue.finish()\n",
                "        for n in range(len(buckets)):\n            queue.ready(n)\n",
            ),
        ),
        (f"{EXACT}[2-sgd]",),
    ),
    Mutant(
        "buckets-are-launched-as-they-become-ready",
        ("L6",),
        "A bucket does not wait for its predecessors: ranks whose graphs differ launch in different orders.",
        (
            Edit(
                "collectives.queue.BucketQueue.ready",
                "        while not self.done and self._order[self._next] in self._ready:\n            self._start()\n",
                "        if bucket in self._order[self._next :]:\n"
                "            rest = [other for other in self._order[self._next :] if other != bucket]\n"
                "            self._order = (*self._order[: self._next], bucket, *rest)\n"
                "            self._start()\n",
            ),
        ),
        ("collectives/test_collectives_memory.py::test_buckets_are_launched_in_order_as_soon_as_they_may",),
    ),
    Mutant(
        "any-number-of-buckets-is-in-flight",
        ("L7",),
        "Nothing bounds the buckets under way: a rank holds all of them at once.",
        (
            Edit(
                "collectives.queue.BucketQueue._start",
                "        while len(self._flying) >= self._limit:\n            self._land()\n",
                "",
            ),
        ),
        ("state/test_bytes.py::test_bytes_of_a_rank_are_those_of_the_formulas[0.01-4-2]",),
    ),
    Mutant(
        "stage-2-keeps-whole-gradients",
        ("P27",),
        "The stage table's row of stage 2 is that of stage 1: every rank holds all gradients.",
        (Edit("zero.core.stage", "Stage(2, _W, _S, _S)", "Stage(2, _W, _W, _S)"),),
        ("state/test_bytes.py::test_at_stage_2_no_rank_holds_all_reduced_gradients_after_backward",),
    ),
)

RANKS = (
    Mutant(
        "reduce-scatter-sends-everything",
        ("R2",),
        "Every rank sends its whole contribution to every other one: the sums are right, the traffic W times as much.",
        (
            Edit(
                "collectives.algorithms.pairwise.Pairwise.reduce_scatter",
                "width = -(-(high - low) // GRAIN) * GRAIN",
                "width = -(-source.numel() // GRAIN) * GRAIN",
            ),
            Edit(
                "collectives.algorithms.pairwise.Pairwise.reduce_scatter",
                "arriving = {rank: scratch[n * width : n * width + high - low] for n, rank in enumerate(t.peers())}",
                "everything = {\n"
                "            rank: scratch[n * width : n * width + source.numel()]\n"
                "            for n, rank in enumerate(t.peers())\n"
                "        }\n"
                "        arriving = {rank: whole[low:high] for rank, whole in everything.items()}",
            ),
            Edit(
                "collectives.algorithms.pairwise.Pairwise.reduce_scatter",
                "[t.irecv_chunks(tensor, rank, tag) for rank, tensor in arriving.items()]",
                "[t.irecv_chunks(whole, rank, tag) for rank, whole in everything.items()]",
            ),
            Edit(
                "collectives.algorithms.pairwise.Pairwise.reduce_scatter",
                "[t.isend(source[bounds[to] : bounds[to + 1]], to, tag) for to in t.peers()]",
                "[t.isend(source, to, tag) for to in t.peers()]",
            ),
        ),
        ("state/test_bytes.py::test_traffic_is_the_closed_form[1-1-3-2]",),
    ),
    Mutant(
        "the-global-rank-for-the-group-rank",
        ("R4",),
        "In a sub-group the rank follows from the rank in the world: {1, 3} are 1 and 1, and nobody is 0.",
        (
            Edit(
                "collectives.peer_links.PeerLinks.__init__",
                "self.rank, self.timeout = self.ranks.index(backend.rank)",
                "self.rank, self.timeout = backend.rank % len(ranks)",
            ),
        ),
        ("test_lifetimes.py::test_groups_of_one_world_train_apart[2]",),
    ),
    Mutant(
        "the-owner-is-looked-up-by-another-number",
        ("R5",),
        "A rank of the group is compared with a rank of the world: the owner drops its own contribution.",
        (
            Edit(
                "collectives.algorithms.pairwise.Pairwise.reduce_scatter",
                "                parts.append((source[low:high] if rank == t.rank else arriving[rank])[begin:end])\n",
                "                own = rank == t.backend.rank\n"
                "                if own or rank in arriving:\n"
                "                    parts.append((source[low:high] if own else arriving[rank])[begin:end])\n",
            ),
        ),
        ("test_lifetimes.py::test_groups_of_one_world_train_apart[2]",),
    ),
    Mutant(
        "the-norm-of-the-world",
        ("R6",),
        "The norm of a group's gradients adds up those of every rank in the world.",
        (
            Edit(
                "zero.step.update.Update.clip",
                "            parts = self._transport.exchange(",
                "            parts = Transport(self._transport.backend, channel=77).exchange(",
            ),
        ),
        ("test_lifetimes.py::test_groups_of_one_world_train_apart[2]",),
    ),
    Mutant(
        "equal-splits-of-uneven-slices",
        ("R8",),
        "The native gather takes what arrived for slices in a row, although uneven ones come padded to one width.",
        (
            Edit(
                "collectives.algorithms.process_group.ProcessGroupAlgorithm.all_gather",
                "(buffer[low:high], padded[rank * width : rank * width + high - low])",
                "(buffer[low:high], padded[low:high])",
            ),
        ),
        ("contract/test_gloo.py::test_the_native_baseline_takes_uneven_and_empty_slices[dtype1]",),
    ),
    Mutant(
        "nobody-waits-for-who-is-behind",
        ("L8",),
        "A rank with fewer backwards does not catch up: the others' reductions wait for it in vain.",
        (
            Edit(
                "zero.gradients.agreement.Agreement.meet",
                "self._transport.meet(Tag(Kind.MEET, purpose, rounds, self.number), catch_up, message)",
                "self._transport.exchange(message(), Tag(Kind.EXCHANGE, purpose, 0, self.number))",
            ),
        ),
        ("contract/test_exact.py::test_ranks_that_have_fewer_micro_batches_contribute_nothing[2]",),
    ),
    Mutant(
        "a-record-of-before-the-catch-up-is-final",
        ("L8",),
        "A rank that catches up sends again the record that it made before: what it has contributed since is pending.",
        (
            Edit(
                "collectives.transport.Transport.meet",
                "        while True:\n            told = self._control.swap(message(), tag)\n",
                "        data = message()\n        while True:\n            told = self._control.swap(data, tag)\n",
            ),
        ),
        ("gradients/test_agreement.py::test_a_record_is_that_of_its_rank_after_it_has_caught_up[1-1]",),
    ),
    Mutant(
        "a-message-that-is-out-of-date-stays-unread",
        ("L8",),
        "A message of a rank that has caught up since is skipped by its header alone: its bytes pass for later ones.",
        (
            Edit(
                "collectives.control_plane._arrived",
                "            ControlRecv(messenger, source, theirs, size).wait()\n",
                "            pass\n",
            ),
            Edit(
                "collectives.messenger.Messenger.confirm",
                "                    ControlRecv(self, work.source, theirs, size).wait()\n",
                "",
            ),
        ),
        (
            "collectives/test_collectives_meetings.py::test_a_rank_that_is_behind_learns_of_rounds_that_send_it_no_bytes[hosts1-before2-sizes0-Pairwise]",
        ),
    ),
    Mutant(
        "messages-of-all-ranks-in-the-order-of-hosts",
        ("L8",),
        "What comes down the tree is taken in the order of the hosts: a message passes for another rank's.",
        (
            Edit(
                "collectives.control_plane.Tree.swap",
                "return [found[rank] for rank in range(len(found))]",
                "return list(found.values())",
            ),
        ),
        (f"{TREE}::test_every_rank_has_every_message",),
    ),
    Mutant(
        "a-rank-that-waits-is-silent",
        ("L8",),
        "A rank in the middle of the tree does not say that it waits: its neighbours take it for the one that stopped.",
        (
            Edit(
                "collectives.control_plane.Tree._tell",
                "for to in ranks]",
                "for to in ()]",
            ),
        ),
        (f"{TREE}::test_ranks_that_come_one_after_another_are_all_waited_for[{{0: 1.2, 1: 2.6}}]",),
    ),
    Mutant(
        "all-ranks-lose-patience-at-once",
        ("L8",),
        "A rank waits no longer for one that waits itself than for any other: it names that one, which is well.",
        (
            Edit(
                "collectives.control_plane.Tree.__init__",
                "chain * (self._pause + GRACE) + GRACE if chain else 0.0",
                "0.0 * chain",
            ),
        ),
        (f"{TREE}::test_a_rank_that_is_silent_is_named_by_all[5]",),
    ),
    Mutant(
        "a-rank-steps-before-all-agreed",
        ("L8",),
        "A rank compares its record with those of the ranks before it alone: it steps although a later one refuses.",
        (
            Edit(
                "zero.gradients.agreement.Agreement.agree",
                "        check(records, purpose, name)\n",
                "        check(records[: self._transport.rank + 1], purpose, name)\n",
            ),
        ),
        ("gradients/test_agreement.py::test_reports_come_also_where_the_ranks_do_not_agree",),
    ),
    Mutant(
        "parts-of-a-norm-that-differ-are-added",
        ("L11",),
        "A clip adds up parts of the norm that were made before the ranks agreed which gradients exist.",
        (
            Edit(
                "zero.gradients.reducer.Reducer.finalize_grads",
                " if norm is not None and len(set(used)) == 1 else None",
                " if norm is not None else None",
            ),
        ),
        ("gradients/test_agreement.py::test_one_norm_on_all_ranks_although_one_has_forgotten_a_gradient[1-1]",),
    ),
    Mutant(
        "an-abort-is-not-told",
        ("L8",),
        "A rank that fails keeps it to itself: the others wait until their time limit and learn no reason.",
        (
            Edit(
                "collectives.peer_links.PeerLinks._abort",
                "        for to in self.peers:\n            try:\n                kept.append(",
                "        for to in ():\n            try:\n                kept.append(",
            ),
        ),
        ("test_errors.py::test_an_error_in_one_ranks_step_is_told_to_the_others[2]",),
    ),
    Mutant(
        "headers-are-not-compared",
        ("L8",),
        "Ranks in different collectives of one size take each other's bytes.",
        (
            Edit(
                "collectives.messenger.Messenger.confirm",
                "if not header.startswith(first.packed):",
                "if Tag.unpack(header)[1] != first.size:",
            ),
        ),
        (
            "collectives/test_collectives_failures.py::test_ranks_in_different_collectives_both_learn_of_both[other1-Pairwise]",
        ),
    ),
    Mutant(
        "a-send-is-trusted-to-end",
        ("L8",),
        "A rank waits for a send to a rank of which it hears nothing: if that one is killed, until the time limit.",
        (
            Edit("collectives.messenger.Messenger.send", "(large or one_way)", "large"),
            Edit("collectives.messenger.Messenger.recv", "(size > SMALL or one_way)", "size > SMALL"),
        ),
        (
            "collectives/test_lost_sends.py::test_a_send_is_waited_for_only_after_its_receiver_was_heard_from[ring-reduce_scatter]",
        ),
    ),
    Mutant(
        "acks-are-counted-in-order",
        ("L8",),
        "A send waits for the acks of all messages before it: a reduction for that of a gather which is read after it.",
        (
            Edit(
                "collectives.messenger.Messenger.wait_ack",
                "while number in state.unread:",
                "while number >= min(state.unread, default=number + 1):",
            ),
        ),
        ("collectives/test_lost_sends.py::test_a_reduction_does_not_wait_for_the_gather_before_it[0-pairwise]",),
    ),
    Mutant(
        "two-optimizers-share-a-channel",
        ("L9",),
        "Messages of two optimizers over one group travel on one channel, and one reads what the other was sent.",
        (
            Edit(
                "collectives.transport.Transport.fork",
                'return Transport(self.backend, self._messenger.ranks, int.from_bytes(first, "little"))',
                "return Transport(self.backend, self._messenger.ranks, 1 if first else 0)",
            ),
        ),
        ("collectives/test_collectives_groups.py::test_messages_of_forked_channels_do_not_mix",),
    ),
    Mutant(
        "the-divisor-is-the-class-s",
        ("R18",),
        "The divisor is kept where all instances share it: building or setting one optimizer changes another.",
        (
            Edit(
                "zero.gradients.backward_schedule.BackwardSchedule.__init__",
                "        self.divisor: float = transport.world_size  #",
                "        type(self).divisor = transport.world_size  #",
            ),
            Edit(
                "zero.gradients.backward_schedule.BackwardSchedule.set_divisor",
                "        self.divisor = value\n",
                "        type(self).divisor = value\n",
            ),
        ),
        ("test_lifetimes.py::test_a_second_optimizer_changes_nothing_of_the_first",),
    ),
    Mutant(
        "every-rank-keeps-its-own-weights",
        ("L10",),
        "Construction does not copy rank 0's values: the ranks train different models.",
        (
            Edit(
                "zero.parameters.storage.ParameterStorage._values",
                "        broadcast(self._transport, [whole])\n",
                "",
            ),
        ),
        ("contract/test_public_calls.py::test_construction_copies_rank_0s_parameters_and_buffers",),
    ),
    Mutant(
        "a-chunk-is-sent-on-before-it-came",
        ("L10",),
        "A rank sends a chunk on before it was received: the ranks behind it get this rank's own values.",
        (
            Edit(
                "collectives.broadcast._arriving",
                "        if len(recvs) == AHEAD:\n            yield _arrived(recvs)\n",
                "        yield chunk\n",
            ),
            Edit(
                "collectives.broadcast._arriving",
                "    while recvs:\n        yield _arrived(recvs)\n",
                "    while recvs:\n        _arrived(recvs)\n",
            ),
        ),
        (f"{BROADCAST}::test_several_tensors_follow_each_other_whatever_is_late",),
    ),
    Mutant(
        "the-last-chunk-stays-behind",
        ("L10",),
        "A broadcast sends whole chunks: the rest of a tensor keeps each rank's own values.",
        (
            Edit(
                "collectives.broadcast.ring_broadcast",
                "torch.split(as_bytes(buffer), CHUNK)",
                "torch.split(as_bytes(buffer)[: as_bytes(buffer).numel() // CHUNK * CHUNK or None], CHUNK)",
            ),
        ),
        (f"{BROADCAST}::test_every_rank_has_rank_0s_bytes_and_sends_each_at_most_once[5-more than one]",),
    ),
    Mutant(
        "all-chunks-are-under-way-at-once",
        ("L7",),
        "A broadcast waits for no send before the last: a copy of the whole tensor may be under way.",
        (
            Edit(
                "collectives.broadcast.ring_broadcast",
                "            if len(sends) > AHEAD:\n                sends.popleft().wait()\n",
                "",
            ),
        ),
        (f"{BROADCAST}::test_few_chunks_are_under_way_at_a_time_however_large_the_tensor_is",),
    ),
    Mutant(
        "names-are-not-in-the-digest",
        ("R17",),
        "Ranks that built parameters of the same shapes in another order do not notice.",
        (
            Edit(
                "zero.core.layout.ParameterSpec.line",
                '        return f"{names} {list(self.shape)}',
                '        return f"{list(self.shape)}',
            ),
        ),
        ("test_errors.py::test_ranks_with_the_same_shapes_in_another_order_are_told",),
    ),
    Mutant(
        "who-is-trainable-is-not-compared",
        ("L4",),
        "A parameter that one rank alone has unfrozen is trained on the gradient of that rank.",
        (
            Edit("zero.runtime.accumulator.GradAccumulator._launch", "zlib.crc32(trainable)", "0"),
            Edit(
                "zero.gradients.agreement.check",
                "if record.trainable != first.trainable:",
                "if first.trainable is None:",
            ),
        ),
        ("test_errors.py::test_a_parameter_that_one_rank_alone_freezes_is_an_error_on_every_rank",),
    ),
)

GEOMETRY = (
    Mutant(
        "offsets-in-32-bits",
        ("S27",),
        "Offsets wrap at 2^31: a parameter lies on top of another one.",
        (
            Edit(
                "zero.core.buckets._bucket",
                "Slot(first + position, offset, spec.numel) for",
                "Slot(first + position, (offset + 2**31) % 2**32 - 2**31, spec.numel) for",
            ),
        ),
        ("core/test_layout.py::test_a_slot_begins_where_the_one_before_ends_also_beyond_two_to_the_31",),
    ),
    Mutant(
        "an-exact-fit-is-refused",
        ("R15",),
        "A parameter that fills a bucket to the last byte goes into the next one: more buckets than were asked for.",
        (
            Edit(
                "zero.core.buckets._buckets",
                "used[key] + nbytes > (first_bytes",
                "used[key] + nbytes >= (first_bytes",
            ),
        ),
        ("core/test_layout.py::test_an_exact_fit_is_accepted_and_one_byte_less_is_not",),
    ),
    Mutant(
        "cuts-anywhere",
        ("L1",),
        "Slices are cut at any element: vector kernels end elsewhere than in one tensor, and fused steps "
        "differ by bits.",
        (Edit("zero.core.layout", "ALIGNMENT_BYTES = 64  # a", "ALIGNMENT_BYTES = 8  # a"),),
        ("core/test_layout.py::test_the_drawing_of_the_module_is_what_is_built",),
    ),
)

MUTANTS = (*WAITS, *RANKS, *GEOMETRY)
