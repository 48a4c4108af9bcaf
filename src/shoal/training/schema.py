"""What of a model is averaged: the parameters that the attached optimizer trains, and the floating buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.core.errors import AttachError, SchemaChanged
from shoal.overlay.charter import Schema
from shoal.tensors.flat import HALF_DTYPES, WIRE_DTYPES, dtype_name

COMPILED_PREFIX = "_orig_mod."
"""torch.compile puts this before every name; compiled and plain peers train together."""
AS_ATTACHED = "keep shapes and requires_grad as they were at attach, or leave and join again"


@dataclass(frozen=True)
class Attached:
    """The tensors of one attached model, by name and in the model's order; tied tensors stand once."""

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    local_buffers: dict[str, Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        """What is averaged: the parameters, then the floating buffers."""
        return [*self.parameters.values(), *self.buffers.values()]

    @property
    def schema(self) -> Schema:
        """Name, shape and dtype of each averaged tensor."""
        named = [*self.parameters.items(), *self.buffers.items()]
        return [(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in named]


def attached(model: nn.Module, optimizer: torch.optim.Optimizer) -> Attached:
    """Choose the averaged tensors. Raises AttachError when model and optimizer do not belong together."""
    if not isinstance(model, nn.Module):
        raise AttachError(f"attach takes a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise AttachError(f"attach takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = {_plain(name): parameter for name, parameter in model.named_parameters()}
    strangers = trained - {id(parameter) for parameter in named.values()}
    if strangers:
        raise AttachError(
            f"{len(strangers)} of the optimizer's parameters are not parameters of the model: "
            f"make the optimizer from model.parameters() after the model is moved or replaced"
        )
    parameters = {name: p for name, p in named.items() if id(p) in trained and p.requires_grad}
    if not parameters:
        raise AttachError("the optimizer trains no parameter of the model that requires a gradient")
    for name, parameter in parameters.items():
        if parameter.dtype not in (*WIRE_DTYPES, *HALF_DTYPES):
            raise AttachError(f"{name} has dtype {dtype_name(parameter.dtype)}, which can't be averaged")
    buffers = {_plain(name): buffer for name, buffer in model.named_buffers()}
    floating = {name: buffer for name, buffer in buffers.items() if buffer.dtype in (*WIRE_DTYPES, *HALF_DTYPES)}
    local = {name: buffer for name, buffer in buffers.items() if name not in floating}
    return Attached(parameters, floating, local)


def check_unchanged(model: nn.Module, optimizer: torch.optim.Optimizer, schema: Schema) -> Attached:
    """The model's tensors now. Raises SchemaChanged with the first one that is not as it was at attach."""
    try:
        now = attached(model, optimizer)
    except AttachError as error:
        raise SchemaChanged(f"the attached model changed: {error}; {AS_ATTACHED}") from None
    for before, after in zip(schema, now.schema, strict=False):
        if before != after:
            was = f"{before[0]} {before[1]} {before[2]}"
            raise SchemaChanged(f"the attached model changed: {was} is now {after}; {AS_ATTACHED}")
    if len(schema) != len(now.schema):
        changed = {entry[0] for entry in schema} ^ {entry[0] for entry in now.schema}
        names = ", ".join(sorted(changed))
        raise SchemaChanged(f"the attached model changed: {names} came or went (requires_grad?); {AS_ATTACHED}")
    return now


def _plain(name: str) -> str:
    return name.replace(COMPILED_PREFIX, "")
