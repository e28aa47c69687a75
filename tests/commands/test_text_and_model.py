"""A micro-batch of `zero train` depends on its coordinates alone, and the weights on the seed."""

from __future__ import annotations

from pathlib import Path

import torch

from zero.commands.train.data import load_corpus
from zero.commands.train.model import build_model, parameters_sha256

SEQUENCE = 16


def write(path: Path, size: int) -> Path:
    """Write a file of bytes in which any 4 in a row occur once (for size up to 256 * 256)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(bytes([i // 256 + 1, i % 256]) for i in range(size))[:size])
    return path


def text_of(row: torch.Tensor) -> bytes:
    return bytes(row.tolist())


def test_a_folder_is_read_in_order_of_its_paths_without_what_is_hidden(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/c/y.bin", "c", ".git/config", "a/.secret", "a/__pycache__/m.pyc"):
        write(tmp_path / name, 100).write_bytes(name.encode() * 20)
    corpus = load_corpus(tmp_path, SEQUENCE)
    expected = b"".join(name.encode() * 20 for name in ("a/c/y.bin", "a/z.txt", "b.txt", "c"))
    assert text_of(corpus.train) + text_of(corpus.validation) == expected


def test_a_known_micro_batch_stays_what_it_is_and_its_targets_are_the_next_bytes(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path / "text", 1000), SEQUENCE)
    assert (len(corpus.train), len(corpus.validation)) == (900, 100)
    corpus.micro_batch(seed=1, step=7, index=0, batch=2, sequence=4)
    batch = corpus.micro_batch(seed=1, step=2, index=3, batch=2, sequence=4)
    train = text_of(corpus.train)
    assert [train.index(text_of(row)) for row in batch.inputs] == [863, 600]
    assert [train.index(text_of(row)) for row in batch.targets] == [864, 601]
    validation = corpus.validation_batches(batch=3, sequence=SEQUENCE, windows=4)
    places = [text_of(corpus.validation).index(text_of(row)) for found in validation for row in found.targets]
    assert places == [1, 28, 56, 84], "from its first byte on, without overlap"


def test_the_weights_are_a_function_of_the_seed_and_leave_the_global_state_alone() -> None:
    before = torch.get_rng_state()
    first = build_model("tiny", 16, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    again, other = build_model("tiny", 16, seed=3), build_model("tiny", 16, seed=4)
    assert parameters_sha256(again) == parameters_sha256(first) != parameters_sha256(other)
    assert again.head.weight is again.embedding.weight


def test_a_logit_does_not_depend_on_later_bytes() -> None:
    model = build_model("tiny", 16, 0)
    text = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = text.clone()
    changed[:, 9:] = 255 - changed[:, 9:]
    before, after = model(text), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])
