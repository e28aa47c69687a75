"""The model of `zero train`: its weights are a function of a seed; it is causal and tied, and it learns."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from zero.commands.train.model import PRESETS, _rotary_table, _rotate, build_model, loss_fn

pytestmark = pytest.mark.full


def tokens(batch: int, sequence: int, seed: int = 0) -> Tensor:
    return torch.randint(256, (batch, sequence), generator=torch.Generator().manual_seed(seed))


def bits(model: torch.nn.Module) -> list[bytes]:
    return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_has_the_parameters_of_its_shape(preset: str) -> None:
    shape = PRESETS[preset]
    block = 12 * shape.width**2 + 13 * shape.width  # attention 4w^2+4w, network 8w^2+5w, two norms 4w
    expected = 256 * shape.width + shape.layers * block + 2 * shape.width
    assert sum(p.numel() for p in build_model(preset, 8, 0).parameters()) == expected


def test_the_weights_are_a_function_of_the_seed_and_leave_the_global_state_alone() -> None:
    before = torch.get_rng_state()
    first = build_model("tiny", 16, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    assert bits(build_model("tiny", 16, seed=3)) == bits(first)
    assert bits(build_model("tiny", 16, seed=4)) != bits(first)


def test_the_head_and_the_embedding_are_one_parameter_with_two_names() -> None:
    model = build_model("tiny", 16, 0)
    assert model.head.weight is model.embedding.weight
    twice = dict(model.named_parameters(remove_duplicate=False))
    assert set(twice) - set(dict(model.named_parameters())) == {"head.weight"}


def test_a_logit_does_not_depend_on_later_bytes() -> None:
    model, text = build_model("tiny", 16, 0), tokens(2, 16)
    changed = text.clone()
    changed[:, 9:] = 255 - changed[:, 9:]
    before, after = model(text), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_a_forward_is_repeatable_and_takes_shorter_sequences() -> None:
    model, text = build_model("tiny", 16, 0), tokens(2, 16)
    assert torch.equal(model(text), model(text))
    torch.testing.assert_close(model(text[:, :5]), model(text)[:, :5])  # another length uses other kernels


def test_rotation_makes_products_depend_on_distance_alone() -> None:
    table = _rotary_table(12, 8).double()
    query, key = torch.rand(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    queries, keys = _rotate(query.expand(12, 8), table), _rotate(key.expand(12, 8), table)
    products = queries @ keys.T
    for distance in range(-11, 12):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=0)  # a float32 table
    assert not torch.allclose(products[0], products[0, :1].expand(12), atol=1e-2)


def test_an_untrained_model_knows_nothing_and_a_trained_one_learns() -> None:
    model, text = build_model("tiny", 16, 0), tokens(4, 17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        loss = loss_fn(model(text[:, :-1]), text[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)  # small initial logits: nearly uniform
    assert losses[-1] < 0.5  # it has memorized 64 bytes
