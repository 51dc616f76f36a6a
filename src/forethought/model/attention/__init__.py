"""Attention over paged keys and values: the protocol, the oracle and the backends."""

from forethought.config.registry import Registry

BACKENDS = Registry(
    "attention",
    {
        "sdpa": "forethought.model.attention.sdpa:SdpaAttention",
        "reference": "forethought.model.attention.reference:ReferenceAttention",
    },
)
