"""The weights of a folder of transformers under the names of a model and in its shapes; what initialises the rest.

Knows: the library's rules of conversion, and how `from_pretrained` applies them. Does not know: optimizers, ranks.

transformers renames and fuses weights when it loads them (one tensor per expert becomes one of all experts), so the
files of many models do not have the model's names. It exports no function that converts without loading a whole model.
The functions below are those that `from_pretrained` calls itself. No underscore begins their names, but their modules
are not documented, so a release may change them; the comment beside each says why it is needed.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel  # type: ignore[import-not-found, unused-ignore]

# The rules of a model: which names change, and which tensors are fused or cut.
from transformers.conversion_mapping import (  # type: ignore[import-not-found, unused-ignore]
    get_model_conversion_mapping,
)

# The two kinds of rules; the order in which tensors of one list are fused; a saved name's new name.
from transformers.core_model_loading import (  # type: ignore[import-not-found, unused-ignore]
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ..parameters.materialize import LazyStateDict, TensorFiles

_REMEDY = "load it by from_pretrained, which gives the model memory, and give that model to ZeroOptimizer"


def weights_of(model: nn.Module, folder: str | Path) -> Mapping[str, Tensor]:
    """Return the weights of a folder by the names of a model on the meta device, for ``init_state_dict``.

    Names and values are those of ``from_pretrained(folder)``: the library's own rules of conversion are applied,
    tensor by tensor, when ``ZeroOptimizer`` asks for a value. A rank therefore never holds more than one tensor of the
    model and its sources. Each rank calls it.

    As in ``from_pretrained``, tensors that the model lacks are left out, with a warning that names them, and
    ``param_init_fn=init_of(model)`` initialises what the folder lacks.

    Args:
        model: a model of transformers, built under ``torch.device("meta")`` and not yet given to an optimizer.
        folder: has ``model.safetensors``, or ``model.safetensors.index.json`` and its files.

    Raises:
        ValueError: the folder has no safetensors files or quantised ones, or a tensor cannot be converted; the message
            names it and the remedy.
    """
    _check_kind(model, "weights_of")
    whole: Any = model
    if getattr(whole.config, "quantization_config", None) is not None:
        raise ValueError(f"the weights of {folder} are quantised: {_REMEDY}")
    _check_dtypes(whole)
    files = TensorFiles(_files(Path(folder)), "weights_of")
    known: dict[str, Tensor] = whole.state_dict(keep_vars=True)
    groups, unknown = _groups(whole, known, files)
    _warn_of_unknown(whole, folder, unknown)
    fuse: dict[str, tuple[list[str], Callable[[list[Tensor]], Tensor]]] = {}
    for group in groups:
        for name, tensor in group.on_meta(files).items():
            if name not in known:
                raise group.error(f"the model lacks {name!r}")
            if name in fuse:
                raise group.error(f"{name!r} comes of others, too")
            if tensor.shape != known[name].shape:
                raise group.error(f"{name!r} has shape {(*known[name].shape,)}, but {(*tensor.shape,)} in the files")
            fuse[name] = group.saved, partial(group.one, name)
    found = LazyStateDict(files, rename=dict.fromkeys(unknown), fuse=fuse)
    _check_ties(found, known)
    return found


def init_of(model: nn.Module) -> Callable[[nn.Module], None]:
    """Return the ``param_init_fn`` of a model of transformers: it calls ``_init_weights`` of the model of each module.

    A model may have other models inside it, an image encoder, say, which initialise their own modules. Raises
    `ValueError` for a model that is not one of transformers.
    """
    _check_kind(model, "init_of")
    outer_first = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    owners: dict[nn.Module, Any] = {module: owner for owner in outer_first for module in owner.modules()}

    def initialize(module: nn.Module) -> None:
        if module not in owners:
            raise ValueError("init_of was given another model: give it the one that the optimizer is built over")
        owners[module]._init_weights(module)  # private: no public call initialises one module

    return initialize


def _check_kind(model: nn.Module, call: str) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"{call} is for a PreTrainedModel of transformers, not for a {type(model).__name__}")


def _files(folder: Path) -> list[Path]:
    """Return the safetensors files that `from_pretrained` would read."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give the local one, as huggingface_hub.snapshot_download returns it")
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        raise ValueError(f"{folder} has neither model.safetensors nor {index.name}: {_REMEDY}")
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of files ({type(error).__name__}: {error})") from error
    return [folder / name for name in names]


def _check_dtypes(model: Any) -> None:
    """Raise `ValueError` if a parameter has 16 bits that `from_pretrained` would keep in 32."""
    # Private: the plan has no public name. Without it such a model would train other bits than a loaded one.
    plan = model._get_dtype_plan(model.dtype)
    for pattern, dtype in plan.items():
        for name, parameter in model.named_parameters():
            if re.search(pattern.replace("*", ".*"), name) and parameter.dtype != dtype:
                raise ValueError(
                    f"{name!r} is {parameter.dtype}, but from_pretrained keeps it in {dtype}: convert that module "
                    f"by .to({dtype}) before weights_of, or {_REMEDY}"
                )


@dataclass
class _Group:
    """Tensors of the files that become one tensor of the model, or several."""

    name: str  # of the model; the first one if there are several
    rule: Any  # a `WeightConverter`, or None: one tensor under another name
    model: Any
    dtype: torch.dtype  # of the model's tensor, to which the library casts before it converts
    patterns: list[Any] = field(default_factory=list)  # of the rule, one for each saved name
    saved: list[str] = field(default_factory=list)

    def on_meta(self, files: TensorFiles) -> dict[str, Tensor]:
        """Return the tensors of the model without values, for their names and shapes."""
        shapes = (files.shape(name) or () for name in self.saved)
        return self._converted([torch.empty(shape, device="meta") for shape in shapes])

    def one(self, name: str, tensors: list[Tensor]) -> Tensor:
        """Return the tensor of this name that comes of those of the files."""
        return self._converted(tensors)[name]

    def _converted(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        cast = [tensor.to(self.dtype) for tensor in tensors]
        if self.rule is None:
            return {self.name: cast[0]}
        rule = deepcopy(self.rule)  # it collects tensors
        try:
            for pattern, saved, tensor in zip(self.patterns, self.saved, cast, strict=True):
                rule.add_tensor(self.name, saved, pattern, tensor)
            found = rule.convert(self.name, model=self.model, config=self.model.config)
        except Exception as error:
            raise self.error(f"{type(error).__name__}: {error}") from error
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}

    def error(self, reason: str) -> ValueError:
        shown = ", ".join(self.saved[:4]) + (f" and {len(self.saved) - 4} others" if len(self.saved) > 4 else "")
        return ValueError(f"{self.name!r} cannot be made of {shown} ({reason}): {_REMEDY}")


def _groups(model: Any, known: dict[str, Tensor], files: TensorFiles) -> tuple[list[_Group], list[str]]:
    """Return what becomes what, and the saved names that the model lacks, as `from_pretrained` finds them."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    groups: dict[str, _Group] = {}
    unknown = []
    for saved in sorted(files, key=dot_natural_key):  # the order of a list of experts, and of rules that remember
        name, pattern = rename_source_key(saved, renamings, converters, model.base_model_prefix, known)
        if name not in known and saved in known:
            name, pattern = rename_source_key(saved, [], [], model.base_model_prefix, known)
        if name not in known:
            unknown.append(saved)
            continue
        rule = None if pattern is None else by_pattern[pattern]
        group = groups.setdefault(name, _Group(name, rule, model, known[name].dtype))
        group.patterns.append(pattern)
        group.saved.append(saved)
        if group.rule is None and len(group.saved) > 1:
            raise group.error("both would become it")
    return list(groups.values()), unknown


def _warn_of_unknown(model: Any, folder: str | Path, unknown: list[str]) -> None:
    # Private: what `from_pretrained` leaves out without a word.
    silent = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
    left = [name for name in unknown if not any(re.search(pattern, name) for pattern in silent)]
    if left:
        shown = ", ".join(left[:8]) + (f" and {len(left) - 8} others" if len(left) > 8 else "")
        warnings.warn(f"{folder}: the model lacks {shown}, which weights_of leaves out", stacklevel=3)


def _check_ties(found: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> None:
    """Raise `ValueError` if the files have two values for what is one tensor in the model."""
    first: dict[int, str] = {}
    for name in found:
        other = first.setdefault(id(known[name]), name)
        if other != name and not torch.equal(found[other], found[name]):
            raise ValueError(
                f"{other!r} and {name!r} are one tensor in the model, but differ in the files: set "
                "config.tie_word_embeddings to False before the model is built"
            )
