"""``bench serving``: its figures by hand, and runs against a server on this machine."""

import asyncio
import json
import math
import re
import socket

import pytest

from forethought.bench.arrivals import poisson
from forethought.bench.serving import (
    Exchange,
    ServingBench,
    ServingReport,
    percentile,
    read_targets,
)
from forethought.cli.main import main
from forethought.errors import ParameterError
from openai_server import serving

STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def server():
    with serving() as server:
        server.says = lambda body: ["one ", "two ", "three"]
        yield server


def chunked(*choices):
    """A stream of one event that ends as it should."""
    event = f"data: {json.dumps({'choices': choices})}\n\n".encode()
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event)


def exchange(sent, chunks, ended, num_tokens, error=None):
    return Exchange(sent, list(chunks), ended, 7, num_tokens, error)


# ---- figures ----------------------------------------------------------------------------------


def test_latencies_are_counted_from_the_times_of_the_chunks():
    one = exchange(1.0, [1.5, 1.6, 2.0], 2.5, 5)
    assert one.ttft == pytest.approx(0.5)
    assert one.e2e == pytest.approx(1.5)
    assert one.tpot == pytest.approx(0.25)  # (1.5 - 0.5) / 4
    assert one.itl == pytest.approx([0.1, 0.4])
    assert exchange(0.0, [1.0], 1.0, 1).tpot is None


def test_percentiles_are_interpolated_between_ranks():
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, p) for p in (0, 50, 90, 100)] == pytest.approx([1, 2.5, 3.7, 4])
    assert percentile([5.0], 99) == 5.0


def test_goodput_counts_requests_that_meet_all_targets():
    quick = exchange(0.0, [0.1], 0.5, 5)  # tpot 0.1
    slow_first = exchange(0.0, [0.4], 0.8, 5)  # tpot 0.1
    slow_rest = exchange(0.0, [0.1], 2.1, 5)  # tpot 0.5
    failed = exchange(0.0, [], 0.1, 0, "no")
    report = ServingReport([quick, slow_first, slow_rest, failed], 2.0, {"ttft": 0.2, "tpot": 0.2})
    assert report.goodput == 0.5
    assert ServingReport([quick], 2.0, {"e2el": 0.4}).goodput == 0.0
    assert ServingReport([quick], 2.0).goodput is None


def test_failed_requests_are_in_no_latency_and_are_told():
    done, failed = exchange(0.0, [1.0], 2.0, 11), exchange(0.0, [], 0.1, 0, "refused")
    report = ServingReport([done, failed], 4.0)
    found = report.to_dict()
    assert (found["num_completed"], found["num_failed"]) == (1, 1)
    assert found["e2e_ms"]["mean"] == 2000.0
    assert found["tpot_ms"]["p99"] == 100.0
    assert found["output_tokens_per_second"] == 2.8  # 11 / 4
    assert report.lines()[-1] == "failed: refused"


def test_targets_are_read_in_milliseconds():
    assert read_targets(["ttft:200", "e2el:1500"]) == {"ttft": 0.2, "e2el": 1.5}


@pytest.mark.parametrize("text", ["ttft", "ttft:fast", "speed:3", "ttft:0", "ttft:nan"])
def test_targets_written_in_another_way_are_refused(text):
    with pytest.raises(ParameterError, match="ttft:200"):
        read_targets([text])


# ---- runs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [True, False])
def test_a_run_measures_every_request(server, chat):
    bench = ServingBench(server.url, chat=chat, fields={"method": "dynasor"})
    report = asyncio.run(bench.run(poisson(["a", "b"], 6, math.inf, 3)))
    assert [each.error for each in report.exchanges] == [None] * 6
    assert {each.num_output_tokens for each in report.exchanges} == {3}
    assert {len(each.chunks) for each in report.exchanges} == {3}
    assert {body["method"] for body in server.requests} == {"dynasor"}
    assert {body["model"] for body in server.requests} == {"m"}  # the first that it lists
    for each in report.exchanges:
        assert each.sent <= each.chunks[0] <= each.chunks[-1] <= each.ended <= report.seconds


def test_requests_wait_for_their_time_and_not_for_each_other(server):
    server.goes_on.clear()
    arrivals = poisson(["a"], 4, 200.0, 3)

    async def main():
        running = asyncio.create_task(ServingBench(server.url, "m").run(arrivals))
        while len(server.requests) < 4:  # all are sent before any is answered
            await asyncio.sleep(0.005)
        server.goes_on.set()
        return await running

    report = asyncio.run(main())
    assert all(e.sent >= a.at for e, a in zip(report.exchanges, arrivals, strict=True))


def test_a_limit_on_requests_at_once_is_kept(server):
    server.seconds_per_piece = 0.002
    bench = ServingBench(server.url, "m", max_concurrency=2)
    report = asyncio.run(bench.run(poisson(["a"], 8, math.inf, 3)))
    assert len(report.completed) == 8
    assert server.most_seen <= 2


def test_a_server_that_refuses_some_requests_fails_only_those(server):
    server.fail_with = [500, 429]
    report = asyncio.run(ServingBench(server.url, "m").run(poisson(["a"], 5, math.inf, 3)))
    assert len(report.completed) == 3
    assert report.to_dict()["num_failed"] == 2


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nbusy", "RequestError.*429.*busy"),
        (STREAM + b"9\r\ndata: {}\n", "ClientPayloadError"),
        (STREAM + b'14\r\ndata: {"error": "x"}\r\n0\r\n\r\n', "RequestError.*x"),
        (STREAM + b"0\r\n\r\n", "broke off"),
        (STREAM + chunked({"index": 0, "delta": {"content": "a"}}), "broke off"),
        (
            STREAM + chunked({"finish_reason": "stop", "text": "a"}, {"index": 1, "text": "b"}),
            "broke off",
        ),
        (b"", "ServerDisconnectedError"),
    ],
)
def test_a_request_that_is_refused_or_cut_tells_why(answer, said):
    """By a server that gives every request the same bytes and hangs up."""
    heads = []

    async def answering(reader, writer):
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        await reader.readexactly(int(re.search(rb"Content-Length: (\d+)", heads[-1])[1]))
        writer.write(answer)
        writer.close()

    async def main():
        async with await asyncio.start_server(answering, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            bench = ServingBench(f"http://us%40er:pw@127.0.0.1:{port}/v1/", "m", api_key="k")
            return await asyncio.wait_for(bench.run(poisson(["a"], 1, math.inf, 3)), 30)

    (exchange,) = asyncio.run(main()).exchanges
    assert re.search(said, exchange.error, re.DOTALL)
    assert heads[0].startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Basic dXNAZXI6cHc=\r\n" in heads[0]


def test_a_password_in_the_url_is_shown_nowhere(server, capsys):
    url = server.url.replace("//", "//us:secret@")
    assert main(["bench", "serving", "--url", url, "--num-requests", "2", "--rate", "inf"]) == 0
    nowhere = ServingBench("http://us:secret@127.0.0.1:1/v1")  # a port that none listens on
    with pytest.raises(ConnectionError, match="lists no model") as refused:
        asyncio.run(nowhere.run(poisson(["a"], 1, math.inf, 3)))
    printed = capsys.readouterr()
    assert '"url"' in printed.out
    assert "secret" not in printed.out + printed.err + str(refused.value)


def test_the_command_prints_a_table_and_one_json_line_last(server, capsys, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("first\nsecond\n")
    options = ["--prompts", str(prompts), "--num-requests", "4", "--rate", "inf"]
    options += ["--goodput", "ttft:60000", "--extra-body", '{"method": "dynasor"}']
    assert main(["bench", "serving", "--url", server.url, *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert (report["num_completed"], report["rate"], report["benchmark"]) == (4, "inf", "serving")
    assert report["goodput"] == pytest.approx(report["requests_per_second"], abs=0.01)
    assert any(line.startswith("TTFT") for line in lines)
    assert main(["bench", "serving", "--url", server.url, *options, "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_trace_is_replayed(server, capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 5, "input_length": 4, "output_length": 2, "hash_ids": [0]}
    path.write_text(json.dumps(line) + "\n")
    assert main(["bench", "serving", "--url", server.url, "--trace", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_completed"], report["rate"]) == (1, None)
    assert server.requests[0]["max_tokens"] == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--url", "nowhere"], "--url"),
        (["--rate", "0"], "rate"),
        (["--num-requests", "0"], "num_requests"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--max-concurrency", "0"], "max_concurrency"),
        (["--goodput", "ttft"], "invalid target"),
        (["--speed", "2"], "--speed is for --trace"),
        (["--trace", "t", "--rate", "2"], "--rate and --trace exclude each other"),
        (["--trace", "missing.jsonl"], "cannot read the requests"),
        (["--extra-body", "{"], "--extra-body is no JSON"),
        (["--extra-body", "[]"], "--extra-body is no object"),
        (["--api", "words"], "--api"),
    ],
)
def test_impossible_arguments_are_refused_before_anything_is_sent(capsys, options, said):
    assert main(["bench", "serving", "--url", "http://127.0.0.1:9/v1", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_server_that_is_not_there_is_told_in_one_line(capsys):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}/v1"
        assert main(["bench", "serving", "--url", url, "--json", "--num-requests", "1"]) == 1
    assert "lists no model" in capsys.readouterr().err
