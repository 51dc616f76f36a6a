"""An OpenAI-compatible HTTP server in front of the engine, a script or other servers.

HTTP is translated here; methods, budgets, events and traces live in ``scaffolding``. The extra
``server`` installs FastAPI, uvicorn and prometheus_client.
"""
