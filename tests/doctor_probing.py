"""A context as the doctor builds it, after the first look."""

import torch

from surefoot.doctor.batches import take
from surefoot.doctor.context import CheckContext
from surefoot.doctor.shapes import check_shapes


def context_of(model, loader, loss_fn=None, optimizer=None, *, seconds=2.0, clip=None, loss_of=None):
    """The context of an examination, with the checks of step 1 done."""
    torch.manual_seed(0)
    context = CheckContext(model, loss_fn, optimizer, take(loader), [], seconds, clip, torch.device("cpu"))
    context.checks += check_shapes(context, loss_of)
    return context


def only(checks, name):
    """The check of a name."""
    (found,) = [check for check in checks if check.name == name]
    return found
