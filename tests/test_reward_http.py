"""Rewards from real local HTTP servers: what is tried again, what is not, limits, shards."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from openrlhf_like.reward.base import RewardRequest
from openrlhf_like.reward.http import HttpReward, split_evenly
from openrlhf_like.types import UserError


class Server:
    """Answers each POST with the next of ``script``; after its end with rewards 10 * label."""

    def __init__(self, script=()) -> None:
        self.script = list(script)
        self.bodies: list[dict] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                step = outer.script.pop(0) if outer.script else None
                if step == "drop":
                    self.connection.close()
                    return
                if step == "hang":
                    time.sleep(3)
                    return
                status, text, headers = step or (200, None, {})
                if text is None:
                    rewards = [10 * int(x) for x in body["labels"]]
                    text = json.dumps({"rewards": rewards, "scores": rewards, "extra_logs": {"size": len(rewards)}})
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/get_reward"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def serve():
    servers = []

    def start(script=()) -> Server:
        servers.append(Server(script))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def ask(reward: HttpReward, n: int = 3):
    batch = RewardRequest([f"p{i}r{i}" for i in range(n)], [f"p{i}" for i in range(n)], [str(i) for i in range(n)])
    return asyncio.run(reward.score(batch))


def test_openrlhf_protocol(serve):
    server = serve()
    results = ask(HttpReward([server.url]))
    sent = {"query": ["p0r0", "p1r1", "p2r2"], "prompts": ["p0", "p1", "p2"], "labels": ["0", "1", "2"]}
    assert server.bodies == [sent]
    assert [(r.reward, r.score) for r in results] == [(0.0, 0.0), (10.0, 10.0), (20.0, 20.0)]
    assert all(r.metrics == {"size": 3.0} for r in results)


def test_fault_28_503_twice_then_200_is_fine_and_the_retries_are_counted(serve):
    server = serve([(503, "busy", {}), (503, "busy", {"Retry-After": "0"})])
    results = ask(HttpReward([server.url], retries=2))
    assert [r.reward for r in results] == [0.0, 10.0, 20.0]
    assert sum(r.retries for r in results) == 2 and len(server.bodies) == 3


def test_fault_28_400_fails_at_once_with_the_body(serve):
    server = serve([(400, '{"detail": "query is too long"}', {})])
    results = ask(HttpReward([server.url]))
    assert len(server.bodies) == 1
    assert all(r.reward is None and "answered 400" in r.error and "query is too long" in r.error for r in results)


def test_fault_28_retries_are_a_flag(serve):
    server = serve([(503, "busy", {"Retry-After": "0"})] * 9)
    results = ask(HttpReward([server.url], retries=1))
    assert len(server.bodies) == 2
    assert "answered 503" in results[0].error and "--reward.http_retries" in results[0].error


def test_fault_28_the_limit_is_a_flag_and_holds_over_all_tries(serve):
    for script in (["hang"], [(503, "busy", {"Retry-After": "600"})], [(429, "slow down", {})] * 99):
        server = serve(script)
        started = time.monotonic()
        results = ask(HttpReward([server.url], limit_s=0.8, retries=99))
        assert time.monotonic() - started < 1.5
        assert all("--timeout.reward" in r.error for r in results), results[0].error


def test_lost_and_refused_connections_are_tried_again(serve):
    server = serve(["drop"])
    assert [r.reward for r in ask(HttpReward([server.url]))] == [0.0, 10.0, 20.0]
    gone = Server()
    gone.close()
    results = ask(HttpReward([gone.url], retries=1))
    assert all("--reward.http_retries" in r.error for r in results) and results[0].retries == 1


def test_several_urls_share_the_samples_in_order_and_fail_apart(serve):
    one, two, broken = serve(), serve(), serve([(400, "no", {})])
    results = ask(HttpReward([one.url, two.url, broken.url]), n=8)
    assert [len(s.bodies[0]["query"]) for s in (one, two, broken)] == [2, 3, 3]
    assert [r.reward for r in results] == [0.0, 10.0, 20.0, 30.0, 40.0, None, None, None]
    assert [r.reward for r in ask(HttpReward([one.url, two.url]), n=1)] == [0.0]


def test_wrong_count_names_the_url_without_its_password(serve):
    server = serve([(200, '{"rewards": [1.0]}', {})])
    url = server.url.replace("127", "user:secret@127")
    with pytest.raises(UserError, match="/get_reward returned 1 value as rewards for 3 samples") as caught:
        ask(HttpReward([url]))
    assert "secret" not in str(caught.value)


def test_null_and_nan_in_the_answer_exclude_one_sample(serve):
    server = serve([(200, '{"rewards": [1.0, null, NaN]}', {})])
    results = ask(HttpReward([server.url]))
    assert [r.reward for r in results] == [1.0, None, None] and [r.excluded for r in results] == [False, True, True]


def test_an_answer_that_is_not_json_is_shown(serve):
    server = serve([(200, "<html>proxy login</html>", {})])
    results = ask(HttpReward([server.url]))
    assert all("not JSON" in r.error and "proxy login" in r.error for r in results)


def test_malformed_url_is_refused():
    with pytest.raises(UserError, match="--reward.remote_url http:///x"):
        HttpReward(["http:///x"])


@pytest.mark.parametrize("n", [0, 1, 7, 64])
@pytest.mark.parametrize("parts", [1, 3, 8])
def test_split_evenly_covers_everything_once(n, parts):
    ranges = split_evenly(n, parts)
    assert len(ranges) == parts and [i for r in ranges for i in r] == list(range(n))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
