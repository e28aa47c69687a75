"""Mutants of processes that are forked from a rank or end at once, and of several threads in one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collectives.messenger import SMALL

from .mutant import Edit, Mutant, Wrap

ENDS = "collectives/test_ends.py::test_no_rank_needs_one_whose_call_has_returned"
FORKS, THREADS = "parameters/test_forks.py", "parameters/test_threads.py"
RAISES = f"{FORKS}::test_what_a_forked_child_does_at_stage_3_raises_at_once_and_the_ranks_go_on"
COLLECTS = f"{FORKS}::test_to_collect_an_optimizer_in_a_forked_child_takes_nothing_from_the_ranks"
BESIDE = f"{THREADS}::test_a_forward_beside_one_of_another_thread_is_refused_and_training_goes_on"


def bytes_go_first(_: Any) -> Callable[..., bool]:
    """Send the bytes of every short message before its header, also over a network."""
    return lambda messenger, size, peer: size > SMALL


def without_acks(real: Callable[..., Any]) -> Callable[..., Any]:
    """Ask for no ack of a control message."""
    return lambda messenger, data, to, tag, acked=False: real(messenger, data, to, tag)


def nothing(_: Any) -> Callable[..., None]:
    return lambda *_: None


MUTANTS = (
    Mutant(
        "a-rank-ends-before-its-record-was-asked-for",
        ("L8",),
        "A rank returns from a meeting although others have not asked for its record: if it ends, they raise.",
        (Wrap("collectives.messenger.Messenger.follows", bytes_go_first),),
        (f"{ENDS}[pairwise-exchange-False]",),
    ),
    Mutant(
        "a-rank-ends-before-its-tree-has-its-answer",
        ("L8",),
        "A rank returns from a meeting by a tree although those below lack the answer: if it ends, they raise.",
        (
            Wrap("collectives.messenger.Messenger.send_control", without_acks),
            Wrap("collectives.messenger.Messenger.acknowledge_control", nothing),
        ),
        (f"{ENDS}[tree-meet-False]",),
    ),
    Mutant(
        "a-fork-enters-what-is-shown",
        ("L2",),
        "A process that was forked inside `gathered()` runs forwards with values of whatever step the ranks are at.",
        (
            Edit(
                "zero.parameters.unit_hooks.UnitHooks.entered",
                "        self.manager.shards.check_process()  # before a lock",
                "        pass  # before a lock",
            ),
        ),
        (f"{RAISES}[auto-inside_gathered]",),
    ),
    Mutant(
        "a-fork-says-that-its-rank-failed",
        ("L8",),
        "A forked process that leaves a collective call by an error tells the others that its rank failed.",
        (
            Edit(
                "collectives.peer_links.PeerLinks.abort",
                "        if os.getpid() != self._process:\n            return list(self.peers)\n",
                "",
            ),
        ),
        (f"{RAISES}[auto-after_a_step]",),
    ),
    Mutant(
        "a-fork-shuts-the-sockets-of-its-rank",
        ("L9",),
        "Where a forked process lets go of its copy of an optimizer, the rank's sockets are shut, not only its own.",
        (
            Edit(
                "collectives.backends.shared_memory.PeerProcess.__del__",
                "    def __del__(self) -> None:\n        self.socket.close()\n",
                "    def __del__(self) -> None:\n        self.socket.shutdown(socket.SHUT_RDWR)\n"
                "        self.socket.close()\n",
            ),
        ),
        (f"{COLLECTS}[3-auto]",),
    ),
    Mutant(
        "two-threads-are-inside-forwards",
        ("L2",),
        "A forward begins while another thread is inside one: each drops units that the other is about to use.",
        (
            Edit(
                "zero.parameters.unit_hooks.UnitHooks.check_alone",
                '                self._refuse(forward.thread, "a forward")\n',
                "                continue\n",
            ),
        ),
        (f"{BESIDE}[one-rank]",),
    ),
    Mutant(
        "a-forward-that-is-refused-ends-another-thread-s",
        ("L3",),
        "What a thread that was refused leaves behind it releases the unit that the other thread is computing with.",
        (
            Edit(
                "zero.parameters.unit_hooks.UnitHooks._innermost",
                " and last[0].thread is threading.current_thread()",
                "",
            ),
        ),
        (f"{BESIDE}[one-rank]",),
    ),
    Mutant(
        "a-forward-that-is-refused-ends-another-thread-s-backward",
        ("L3",),
        "A forward that is refused beside a backward of another thread releases the units that this computes with.",
        (
            Edit(
                "zero.parameters.unit_hooks.UnitHooks.check_alone",
                "        if thread is not None:",
                "        if False:",
            ),
        ),
        ("parameters/test_threads.py::test_a_forward_that_is_refused_inside_a_backward_releases_nothing[travel]",),
    ),
    Mutant(
        "a-thread-that-is-refused-puts-hooks-into-a-compiled-call",
        ("L3",),
        "Hooks of a unit reappear inside the compiled call of another thread, and become part of its graph.",
        (
            Edit(
                "zero.parameters.module_hooks.ModuleHooks._exit_compiled",
                "if module is not None and taken_away:",
                "if module is not None:",
            ),
        ),
        (
            "parameters/test_threads.py::test_a_thread_that_is_refused_leaves_the_compiled_call_of_another_as_it_is[one-rank]",
        ),
    ),
    Mutant(
        "a-generator-that-yields-ends-a-forward",
        ("L3",),
        "A forward in which generators run looks interrupted to another thread, which ends it and releases its units.",
        (
            Edit(
                "zero.runtime.backward_tracker.runs",
                "if own or last is None or not last.f_code.co_flags & _GENERATOR:",
                "if True:",
            ),
        ),
        ("parameters/test_threads.py::test_a_thread_whose_generators_come_and_go_is_inside_its_forward_still",),
    ),
    Mutant(
        "a-later-thread-passes-for-an-interrupted-one",
        ("L3",),
        "A forward whose thread an interrupt has ended goes on for ever, if a later thread with its number is in one.",
        (
            Edit(
                "zero.runtime.backward_tracker.runs",
                "if not own and thread not in threading.enumerate():",
                "if False:",
            ),
        ),
        ("parameters/test_threads.py::test_a_later_thread_with_the_number_of_an_interrupted_one_is_not_taken_for_it",),
    ),
    Mutant(
        "a-forward-begins-while-another-thread-releases",
        ("L2",),
        "A thread's forward shows units while another thread, whose forward ends, is releasing them.",
        (
            Edit(
                "zero.parameters.unit_hooks.UnitHooks.left",
                "with self._backwards.beginning if len(self._running) == 1 else nullcontext():",
                "with nullcontext():",
            ),
        ),
        ("parameters/test_threads.py::test_a_forward_begins_when_all_of_another_threads_is_over",),
    ),
)
