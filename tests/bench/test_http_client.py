"""``HttpClient`` against servers that answer with given bytes."""

import asyncio
from contextlib import aclosing, asynccontextmanager

import pytest

from forethought.bench.http_client import HttpClient
from forethought.errors import RequestError

HEAD = b"HTTP/1.1 200 OK\r\nX-Any: 1\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


class Answers:
    """A server that gives each request the next answer; None closes the connection instead."""

    def __init__(self, *answers):
        self.answers, self.requests, self.num_connections = list(answers), [], 0

    async def _serve(self, reader, writer):
        self.num_connections += 1
        while self.answers:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            length = int(head.lower().split(b"content-length:")[1].split()[0])
            self.requests.append(head + await reader.readexactly(length))
            answer = self.answers.pop(0)
            if answer is None:
                break
            writer.write(answer)
            if b"content-length" not in answer.lower() and b"chunked" not in answer:
                break
        writer.close()

    @asynccontextmanager
    async def client(self, url="http://127.0.0.1:{}/v1/", **options):
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with HttpClient(url.format(port), **options) as client:
                yield client


async def lines_of(client):
    return [line async for line in client.lines("/chat", {"a": "ä"})]


@pytest.mark.parametrize(
    "answer",
    [
        CHUNKED + b"5;x=y\r\none\r\n\r\n6\r\ntwo\nth\r\n3\r\nree\r\n0\r\nX-Trailer: 1\r\n\r\n",
        HEAD + b"Content-Length: 14\r\n\r\none\r\ntwo\nthree",
        HEAD + b"Connection: close\r\n\r\none\r\ntwo\nthree",
        b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"content-length: 13\r\n\r\none\ntwo\nthree",
    ],
)
def test_the_lines_of_a_body_come_whole_however_it_is_sent(answer):
    async def main():
        async with Answers(answer).client() as client:
            return await lines_of(client)

    assert asyncio.run(main()) == ["one", "two", "three"]


def test_a_connection_serves_one_request_after_another():
    server = Answers(CHUNKED + b"0\r\n\r\n", HEAD + b'Content-Length: 8\r\n\r\n{"b": 2}')

    async def main():
        async with server.client(api_key="k") as client:
            assert await lines_of(client) == []
            return await client.get("/models")

    assert asyncio.run(main()) == {"b": 2}
    assert server.num_connections == 1
    post, get = server.requests
    assert post.startswith(b"POST /v1/chat HTTP/1.1\r\n")
    assert post.endswith(b'\r\n\r\n{"a": "\\u00e4"}')
    assert get.startswith(b"GET /v1/models HTTP/1.1\r\n")
    assert all(b"\r\nAuthorization: Bearer k\r\n" in each for each in server.requests)


def test_a_kept_connection_that_the_server_has_closed_is_replaced():
    server = Answers(CHUNKED + b"0\r\n\r\n", None, HEAD + b"Content-Length: 4\r\n\r\nmore")

    async def main():
        async with server.client() as client:
            await lines_of(client)
            return await lines_of(client)

    assert asyncio.run(main()) == ["more"]
    assert server.num_connections == 2


@pytest.mark.parametrize(
    "answer", [None, CHUNKED + b"5\r\non", HEAD + b"Content-Length: 9\r\n\r\n."]
)
def test_a_connection_that_ends_early_is_an_error(answer):
    async def main():
        server = Answers(answer)
        async with server.client() as client:
            server.answers = [answer]
            await asyncio.wait_for(lines_of(client), 30)

    with pytest.raises(RequestError, match="closed the connection"):
        asyncio.run(main())


def test_a_refusal_tells_its_status_and_what_the_server_said():
    refused = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nbusy"

    async def main():
        async with Answers(refused).client() as client:
            await lines_of(client)

    with pytest.raises(RequestError, match=r"(?s)429.*busy"):
        asyncio.run(main())


def test_a_user_and_a_password_in_the_url_are_sent_and_no_part_of_the_host():
    server = Answers(CHUNKED + b"0\r\n\r\n")

    async def main():
        async with server.client("http://us%40er:pw@127.0.0.1:{}/v1") as client:
            await lines_of(client)

    asyncio.run(main())
    assert b"\r\nAuthorization: Basic dXNAZXI6cHc=\r\n" in server.requests[0]
    assert b"\r\nHost: 127.0.0.1:" in server.requests[0]


def test_leaving_an_answer_early_closes_its_connection():
    server = Answers(CHUNKED + b"4\r\none\n\r\n", CHUNKED + b"0\r\n\r\n")

    async def main():
        async with server.client() as client:
            async with aclosing(client.lines("/chat", {})) as lines:
                assert await anext(lines) == "one"
            assert await lines_of(client) == []

    asyncio.run(main())
    assert server.num_connections == 2
