"""The loss of a draft model: how far its law of each next token lies from its target's.

Knowledge distillation (Hinton, Vinyals and Dean 2015) at temperature 1, on text that the target
wrote: where drafts will be made, and where the closeness of the two laws decides how many of them
are accepted (Leviathan et al. 2023, section 3). Knows nothing about where samples come from.
"""

from torch import Tensor

from forethought.training.reasoner.network import Network


def distillation_loss(network: Network, tokens: Tensor, choices: Tensor, probs: Tensor) -> Tensor:
    """Mean cross entropy, in nats, from the target's laws to the network's.

    Its lower bound is the entropy of the target, which no network changes.

    Args:
        network: the draft model.
        tokens: int64 ``[R, W]``.
        choices: int64 ``[R, W, TOP]``, the target's likeliest tokens behind each place.
        probs: float32 ``[R, W, TOP]``, their probabilities; a place with nothing but 0 is left out.
    """
    logits = network(tokens).float()
    surprise = logits.logsumexp(-1, keepdim=True) - logits.gather(-1, choices)
    return (probs * surprise).sum() / probs.sum()
