"""schemathesis over the OpenAPI document: whatever is sent, the server does not fail."""

import subprocess
import sys

CHECKS = "not_a_server_error,content_type_conformance"


def test_no_request_makes_the_server_fail(scripted, tmp_path):
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{scripted}/openapi.json"]
    command += ["--checks", CHECKS, "--max-examples", "6", "--seed", "1", "--workers", "2"]
    command += ["--request-timeout", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
