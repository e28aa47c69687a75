"""What calls take, also on ranks that differ. Refused calls change nothing."""

from __future__ import annotations

from ..support.machine import program as p
from .record import Dial, Moment

OF_CALLS = {
    **{
        f"setattr(optimizer, 'divisor', {value})": "ValueError: … a finite number other than 0"
        for value in ("0", "float('nan')", "'3'", "None", "True")
    },
    **{f"optimizer.clip_grad_norm_({value})": "TypeError: max_norm must be a number, not " for value in ("None", "''")},
    "optimizer.clip_grad_norm_([model.last.bias], 1.0)": "TypeError: max_norm must be a number, not ",
    "optimizer.clip_grad_norm_(float('nan'))": "ValueError: … max_norm",
    "optimizer.clip_grad_norm_(1.0, 0)": "ValueError: … norm_type",
    "optimizer.clip_grad_norm_(1.0, replicated=[model.last.bias])": "(replicated=...) without over=: … pass over=, too",
    "optimizer.clip_grad_norm_(1.0, also=optimizer)": "TypeError: also must be a list of … not a ZeroOptimizer",
    "optimizer.consolidate_state_dict(9)": "consolidate_state_dict: rank 9 is not one of the 2 ranks",
    **{
        f"optimizer.full_state_dict({to})": "TypeError: full_state_dict: to must be the number of"
        for to in ("'0'", "0.0", "True")
    },
    "optimizer.full_tensors(True)": "TypeError: full_tensors: to must be the number of",
    "optimizer.full_grad('last.bias')": "TypeError: 'last.bias' is no parameter: give the tensor",
    "optimizer.gathered('last.bias')": "TypeError: gathered() takes parameters, as module.parameters … not a str",
    "optimizer.reset_states(model)": "TypeError: reset_states() takes parameters, … not a Tree",
    **{
        f"MixedPrecision({dtypes})": f"TypeError: … {name} must be one of"
        for name, dtypes in {
            "param_dtype": "torch.float64",
            "reduce_dtype": "torch.bfloat16, reduce_dtype=torch.int8",
            "output_dtype": "torch.bfloat16, output_dtype=torch.float64",
        }.items()
    },
    **{  # with two 16-bit dtypes each part would be rounded twice
        f"MixedPrecision({dtype}, accumulate_dtype=torch.bfloat16)": (
            f"ValueError: … accumulate_dtype torch.bfloat16 must be {dtype}, in which … or wid"
        )
        for dtype in ("torch.float32", "torch.float16")
    },
    **{
        f"register_forward_method(model.first, {name!r})": f"ValueError: … Linear has no method {name!r}"
        for name in ("nothing", "weight", "in_features", "", 3)
    },
    "register_forward_method('first', 'forward')": "TypeError: … a module is needed, not 'first'",
    "optimizer.exchange('text')": "TypeError: rank … exchange() sends bytes, not a str: .encode() makes some",
    "save('nowhere', model)": "TypeError: a ZeroOptimizer is needed, whose states are saved, not a Tree",
    "optimizer.load_state_dict(None)": "ValueError: a torch.optim state dict is needed, with 'state' and",
    "optimizer.add_param_group({})": "TypeError: param_group is {}, not a param group with 'params'",
    "optimizer.add_param_group({'params': [torch.nn.Parameter(torch.ones(2)), 42]})": (
        "TypeError: param_group['params'][1] is 42 (int)"
    ),
    "optimizer.add_param_group({'params': 7})": "TypeError: param_group['params'] is 7 (int)",
    "optimizer.add_param_group({'params': model.first.weight})": (
        "ValueError: add_param_group: 'first.weight' is in a param group already"
    ),
    **{
        f"[o := ZeroOptimizer(torch.nn.Linear(2, 2), process_group=solo()), o.close(), o.{call}()]": "is closed"
        for call in ("step", "zero_grad", "state_dict", "check_replicas", "reset_states")
    },
    **{
        "[m := torch.nn.Linear(2, 2), m(torch.ones(1, 2)).sum().backward(), "
        f"ZeroOptimizer(m, stage={stage}, process_group=solo()).step()]": "was assigned from outside … set it to None"
        for stage in (0, 1, 2, 3)
    },
}
EXACT_SUMS = {
    "1 / (optimizer.sum_over_ranks(2**60 + rank) == 3 * 2**60 + 3)": "nothing",
    "1 / (optimizer.sum_over_ranks((1e300, 1.0, -1e300)[rank]) == 1.0)": "nothing",
}
DIALS = (
    Dial(
        name="calls",
        values={},
        moments=[
            Moment(OF_CALLS),
            Moment(EXACT_SUMS, stages=(2,), changes={"world_size": 3}),
            Moment(
                {"(setattr(optimizer, 'divisor', 2 + rank), optimizer.step())": "divisor … is 2 on rank 0, but 3 on"},
                after=[p.Divide(2), p.Step(), p.ZeroGrad()],
            ),
            Moment(
                {
                    "(rank and optimizer.zero_grad(), optimizer.step())": (
                        "step(): the gradients of rank 0 are divided, those of rank 1 open: clip, step and clear"
                    )
                },
                [p.Backward(1), p.Clip(1.0)],
                [p.ZeroGrad()],
            ),
        ],
    ),
)
