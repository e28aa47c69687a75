"""The text: how it is read and cut, and that a micro-batch depends only on its coordinates."""

from __future__ import annotations

import hashlib
import itertools
import sysconfig
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero.commands.train.data import Corpus, load_corpus

pytestmark = pytest.mark.full

SEQUENCE = 16


def write(path: Path, size: int) -> Path:
    """Write a file of bytes in which any 4 in a row occur once (for size up to 256 * 256)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(bytes([i // 256 + 1, i % 256]) for i in range(size))[:size])
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return load_corpus(write(tmp_path / "text", 1000), SEQUENCE)


def text_of(row: torch.Tensor) -> bytes:
    return bytes(row.tolist())


def test_nine_tenths_are_for_training_and_the_rest_for_validation(tmp_path: Path) -> None:
    path = write(tmp_path / "text", 1009)
    corpus = load_corpus(path, SEQUENCE)
    assert text_of(corpus.train) + text_of(corpus.validation) == path.read_bytes()
    assert len(corpus.train) == 908
    assert corpus.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_folder_is_read_in_order_of_its_paths_without_what_is_hidden(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/c/y.bin", "c", ".git/config", "a/.secret", "a/__pycache__/m.pyc"):
        write(tmp_path / name, 100).write_bytes(name.encode() * 20)
    corpus = load_corpus(tmp_path, SEQUENCE)
    expected = b"".join(name.encode() * 20 for name in ("a/c/y.bin", "a/z.txt", "b.txt", "c"))
    assert text_of(corpus.train) + text_of(corpus.validation) == expected


def test_the_default_text_is_the_source_of_the_standard_library() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    corpus = load_corpus(None, 128)
    text = text_of(corpus.train) + text_of(corpus.validation)
    assert text.startswith((root / "__future__.py").read_bytes())
    assert (root / "json/decoder.py").read_bytes() in text
    assert corpus.sha256 == load_corpus(None, 64).sha256
    assert Path(pytest.__file__).read_bytes() not in text


def test_a_micro_batch_does_not_depend_on_what_was_read_before(corpus: Corpus) -> None:
    coordinates = [(seed, step, index) for seed in (0, 7) for step in (0, 1, 50) for index in (0, 1, 5)]
    forwards = [corpus.micro_batch(*place, batch=3, sequence=SEQUENCE).inputs for place in coordinates]
    backwards = [corpus.micro_batch(*place, batch=3, sequence=SEQUENCE).inputs for place in reversed(coordinates)]
    assert all(torch.equal(one, other) for one, other in zip(forwards, reversed(backwards), strict=True))
    assert len({text_of(inputs.flatten()) for inputs in forwards}) == len(coordinates)


def test_the_bytes_of_a_known_micro_batch_stay_what_they_are(corpus: Corpus) -> None:
    batch = corpus.micro_batch(seed=1, step=2, index=3, batch=2, sequence=4)
    train = text_of(corpus.train)
    assert [train.index(text_of(row)) for row in batch.inputs] == [863, 600]


@given(
    size=st.integers(200, 2000),
    sequence=st.integers(1, 19),
    batch=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
    step=st.integers(0, 10**6),
)
def test_targets_are_the_next_bytes_and_all_come_from_the_training_part(
    tmp_path_factory: pytest.TempPathFactory, size: int, sequence: int, batch: int, seed: int, step: int
) -> None:
    corpus = load_corpus(write(tmp_path_factory.mktemp("data") / "text", size), sequence)
    found = corpus.micro_batch(seed, step, 0, batch, sequence)
    assert found.inputs.shape == found.targets.shape == (batch, sequence)
    assert found.inputs.dtype == found.targets.dtype == torch.int64
    for inputs, targets in zip(found.inputs, found.targets, strict=True):
        assert text_of(inputs[1:]) == text_of(targets[:-1])
        assert text_of(inputs) + text_of(targets[-1:]) in text_of(corpus.train)


def test_every_window_of_the_training_part_can_be_drawn(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path / "text", 20), sequence=1)
    drawn = {text_of(row) for step in range(100) for row in corpus.micro_batch(0, step, 0, 4, 1).targets}
    assert drawn == {bytes([byte]) for byte in corpus.train[1:].tolist()}


@given(size=st.integers(200, 3000), sequence=st.integers(1, 19), batch=st.integers(1, 7), windows=st.integers(1, 40))
def test_validation_windows_lie_in_the_validation_part_and_do_not_overlap(
    tmp_path_factory: pytest.TempPathFactory, size: int, sequence: int, batch: int, windows: int
) -> None:
    corpus = load_corpus(write(tmp_path_factory.mktemp("data") / "text", size), sequence)
    batches = corpus.validation_batches(batch, sequence, windows)
    rows = [
        text_of(row) + text_of(last)
        for found in batches
        for row, last in zip(found.inputs, found.targets[:, -1:], strict=True)
    ]
    text = text_of(corpus.validation)
    assert len(rows) == min(windows, max(1, (len(text) - sequence - 1) // sequence))
    assert all(len(found.inputs) == batch for found in batches[:-1])
    assert rows[0] == text[: sequence + 1]
    assert all(row in text for row in rows)
    if sequence > 3:
        starts = [text.index(row) for row in rows]
        assert all(later - earlier >= sequence for earlier, later in itertools.pairwise(starts))


def test_a_text_of_just_one_sequence_is_enough(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path / "text", 10 * (SEQUENCE + 1)), SEQUENCE)
    assert len(corpus.validation) == SEQUENCE + 1
    (batch,) = corpus.validation_batches(4, SEQUENCE, 9)
    assert text_of(batch.targets[0]) == text_of(corpus.validation[1:])


def test_text_that_is_missing_empty_or_too_short_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"--data .*nowhere: there is no such file or folder"):
        load_corpus(tmp_path / "nowhere", SEQUENCE)
    with pytest.raises(ValueError, match=r"no text in .*empty: it is empty\. Give --data"):
        load_corpus(write(tmp_path / "empty", 0), SEQUENCE)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"no text in .*folder: it is empty"):
        load_corpus(tmp_path / "folder", SEQUENCE)
    with pytest.raises(ValueError, match=r"short has 169 bytes, of which 17 .* one sequence of 17 bytes .* --sequence"):
        load_corpus(write(tmp_path / "short", 169), 17)
