"""Rewards from one or several HTTP servers, such as ``serve_rm`` runs."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from openrlhf_like.reward.base import RewardFunction, RewardRequest, RewardResult
from openrlhf_like.reward.contract import parse_answer
from openrlhf_like.types import UserError

logger = logging.getLogger(__name__)

_BACKOFF_S = 0.5
_BACKOFF_MAX_S = 10.0
_BODY_SHOWN = 500


class HttpReward(RewardFunction):
    """POSTs ``{"query", "prompts", "labels"}`` and expects ``{"rewards", "scores", "extra_logs"}``.

    A batch is cut into one contiguous shard a URL, sent at the same time. Connection errors and the statuses 429 and
    5xx are tried again after 0.5, 1, 2, ... seconds (or as long as ``Retry-After`` says); any other status fails its
    shard at once, with the body. One limit holds for a shard's tries and pauses together.

    Args:
        urls: the servers.
        limit_s: seconds a shard, retries included (``--timeout.reward``).
        retries: further tries after the first (``--reward.http_retries``).
    """

    def __init__(self, urls: list[str], *, limit_s: float = 60.0, retries: int = 3) -> None:
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.netloc:
                raise UserError(f"{self.flag} {_shown(url)}: not an http(s) URL; several are separated by commas")
        self.urls = urls
        self.limit_s = limit_s
        self.retries = retries

    async def score(self, request: RewardRequest) -> list[RewardResult]:
        shards = split_evenly(len(request), len(self.urls))
        timeout = aiohttp.ClientTimeout(total=None)  # _post holds the limit, over all tries
        async with aiohttp.ClientSession(timeout=timeout) as session:
            jobs = [
                self._shard(session, url, request.take(list(shard)))
                for url, shard in zip(self.urls, shards, strict=True)
                if len(shard)
            ]
            parts = await asyncio.gather(*jobs)
        return [result for part in parts for result in part]

    async def _shard(self, session: aiohttp.ClientSession, url: str, request: RewardRequest) -> list[RewardResult]:
        body = {"query": request.queries, "prompts": request.prompts, "labels": request.labels}
        # Labels come from the user's files and may hold dates or decimals; as text they are still of use.
        reply = await self._post(session, url, json.dumps(body, default=str).encode())
        if reply.error is not None:
            results = [RewardResult(error=reply.error) for _ in range(len(request))]
        else:
            results = parse_answer(reply.answer, len(request), f"{self.flag}: {_shown(url)}")
        results[0].retries = reply.retries
        return results

    async def _post(self, session: aiohttp.ClientSession, url: str, body: bytes) -> _Reply:
        started = time.monotonic()
        retries = 0
        while True:
            left = started + self.limit_s - time.monotonic()
            try:
                reply = await asyncio.wait_for(_try(session, url, body), max(left, 0.001))
            except TimeoutError:
                error = f"{_shown(url)} did not answer within {self.limit_s:g} s (--timeout.reward), {retries} retries"
                return _Reply(error=error, retries=retries)
            reply.retries = retries
            if not reply.again:
                return reply
            if retries >= self.retries:
                reply.error = f"{reply.error}, after {retries} retries (--reward.http_retries)"
                return reply
            pause = reply.pause_s if reply.pause_s is not None else backoff_s(retries)
            if time.monotonic() + pause >= started + self.limit_s:
                reply.error = f"{reply.error}, after {retries} retries in {self.limit_s:g} s (--timeout.reward)"
                return reply
            logger.warning("%s; trying again in %.2g s", reply.error, pause)
            await asyncio.sleep(pause)
            retries += 1


@dataclass
class _Reply:
    """``answer``, or ``error`` set; ``again`` says that another try may help."""

    answer: Any = None
    error: str | None = None
    again: bool = False
    pause_s: float | None = None
    retries: int = 0


async def _try(session: aiohttp.ClientSession, url: str, body: bytes) -> _Reply:
    try:
        async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
            text = await response.text(errors="replace")
            status = response.status
            pause = _retry_after(response.headers.get("Retry-After"))
    except (aiohttp.ClientError, ConnectionError) as error:
        return _Reply(error=f"{_shown(url)}: {type(error).__name__}: {_line(str(error))}", again=True)
    if status != 200:
        again = status == 429 or status >= 500
        return _Reply(error=f"{_shown(url)} answered {status}: {_line(text)}", again=again, pause_s=pause)
    try:
        return _Reply(answer=json.loads(text))
    except ValueError:
        return _Reply(error=f"{_shown(url)} answered 200 with a body that is not JSON: {_line(text)}")


def split_evenly(n: int, parts: int) -> list[range]:
    """``parts`` contiguous ranges over ``n`` items whose lengths differ by one at most."""
    bounds = [n * i // parts for i in range(parts + 1)]
    return [range(a, b) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def backoff_s(retry: int) -> float:
    """Seconds before try ``retry + 2``: doubling, with a tenth of jitter so that workers do not come back together."""
    return min(_BACKOFF_S * 2**retry, _BACKOFF_MAX_S) * random.uniform(0.9, 1.1)


def _retry_after(header: str | None) -> float | None:
    """Seconds of a ``Retry-After`` header; its date form is ignored."""
    return float(header) if header is not None and header.strip().isdigit() else None


def _shown(url: str) -> str:
    """The URL without user, password and query, which may hold keys."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _line(text: str) -> str:
    return " ".join(text.split())[:_BODY_SHOWN]
