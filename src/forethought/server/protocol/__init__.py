"""The OpenAI protocol: bodies of requests, and the fields of answers."""
