"""What is made of a recorded trace: replay, HTML, OpenTelemetry, Mooncake."""
