"""Attention over paged keys and values: the protocol and the table of backends."""

from forethought.config.registry import Registry

BACKENDS = Registry(
    "attention",
    {
        "sdpa": "forethought.model.attention.sdpa:SdpaAttention",
        "reference": "forethought.model.attention.reference:ReferenceAttention",
    },
)
