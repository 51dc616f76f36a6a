"""The suite runs offline: the guard in conftest is itself tested."""

import socket
import threading

import pytest


def test_a_connection_to_another_machine_is_refused():
    with socket.socket() as outside, pytest.raises(RuntimeError, match="must not reach"):
        outside.connect(("192.0.2.1", 80))


def test_a_name_of_another_machine_is_not_looked_up():
    with pytest.raises(RuntimeError, match="must not reach"):
        socket.getaddrinfo("example.com", 443)


def test_a_connection_to_this_machine_goes_through():
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        with socket.create_connection(server.getsockname(), timeout=60) as client:
            assert client.recv(1) == b""
