"""Parts that several methods share: searches, probes, revision, retrieval."""
