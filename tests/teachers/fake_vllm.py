"""A server on the loopback address that answers as vLLM 0.32 does, or as it does on a bad day.

Used where a real vLLM cannot be made to show a fault. The wire was copied from a real server's replies;
`test_vllm_live.py` compares the client with a real one.
"""

import asyncio
import base64
import io
import json
import ssl
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from aiohttp import web

from teachers.protocol import Row
from teachers.vllm import VllmTeacher

VOCAB = 50
MAX_MODEL_LEN = 64
MAX_LOGPROBS = 20


def logprobs(ids, seed=0):
    """[position, id]: a made-up model; every id depends on the one before it, and no two values of a row are equal."""
    rows = [np.random.default_rng([seed, before]).normal(size=VOCAB) * 2 for before in ids]
    logits = np.array(rows)
    return (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32).astype(float)


def sampled(ids, seed=0):
    """[None, log p(ids[1] | ids[0]), ...]"""
    table = logprobs(ids, seed)
    return [None, *(float(table[t - 1, ids[t]]) for t in range(1, len(ids)))]


def top(ids, k, seed=0):
    """Per position the sampled id first, then the k best in order, as vLLM lists them; None first."""
    table = logprobs(ids, seed)
    positions: list = [None]
    for t in range(1, len(ids)):
        row = table[t - 1]
        best = np.argsort(-row)[:k]
        positions.append({int(i): float(row[i]) for i in dict.fromkeys([ids[t], *best])})
    return positions


class FakeVllm:
    """`faults` are taken one per scoring request, first come first served; what is left behaves well.

    A fault is a function of (server, request body) that returns a response, or None to go on as usual.
    """

    runner: web.AppRunner
    loop: asyncio.AbstractEventLoop

    def __init__(self, name="tiny", seed=0, fingerprint="vllm-0.32.0-aaaa", key=None, port=0, tls=None):
        self.name, self.seed, self.fingerprint, self.key, self.port = name, seed, fingerprint, key, port
        self.tls: ssl.SSLContext | None = tls
        self.faults: list[Callable] = []
        self.always: list[Callable] = []
        self.asked: list[dict] = []
        self.headers: list[dict] = []
        self.num_open = self.most_open = 0
        self.compress = False

    def start(self):
        ready = threading.Event()
        self.loop = asyncio.new_event_loop()

        async def serve():
            app = web.Application(middlewares=[self._guard])
            app.router.add_get("/v1/models", self._models)
            app.router.add_get("/version", self._version)
            app.router.add_post("/v1/completions", self._completions)
            app.router.add_post("/inference/v1/generate", self._generate)
            self.runner = web.AppRunner(app, shutdown_timeout=0.1)
            await self.runner.setup()
            site = web.TCPSite(self.runner, "127.0.0.1", self.port, ssl_context=self.tls)
            await site.start()
            self.port = self.runner.addresses[0][1]
            ready.set()

        def run():
            self.loop.run_until_complete(serve())
            self.loop.run_forever()

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        assert ready.wait(120)
        return self

    @property
    def url(self):
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    def stop(self):
        async def end():
            await self.runner.cleanup()
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self.loop).result(120)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(120)
        self.loop.close()

    @web.middleware
    async def _guard(self, request, handler):
        self.headers.append(dict(request.headers))
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _models(self, request):
        return web.json_response(
            {"data": [{"id": self.name, "root": f"/m/{self.name}", "max_model_len": MAX_MODEL_LEN}]}
        )

    async def _version(self, request):
        return web.json_response({"version": "0.32.0"})

    async def _completions(self, request):
        body = await request.json()
        if body["model"] != self.name:
            return error(404, f"The model `{body['model']}` does not exist.")
        if body["prompt"] != [[1, 2, 3, 4, 5, 6, 7, 8]]:  # not the client's first greeting
            self.asked.append(body)
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
            try:
                fault = self.faults.pop(0) if self.faults else None
                response = await fault(self, body) if fault else None
                if response is not None:
                    return response
            finally:
                self.num_open -= 1
        for fault in self.always:
            response = await fault(self, body)
            if response is not None:
                return response
        response = self.echo(body) if body.get("echo") else self.plain(body)
        if self.compress:
            response.enable_compression(web.ContentCoding.gzip)
        return response

    async def _generate(self, request):
        return error(400, "prompt_logprob_token_ids requires the V2 model runner")

    def echo_event(self, body, index):
        """One event as a dict, for a fault to spoil."""
        ids, k = body["prompt"][index], body["logprobs"]
        prefix = "token_id:" if body["return_tokens_as_token_ids"] else "text-"
        tops = [
            None if position is None else {f"{prefix}{i}": value for i, value in position.items()}
            for position in top(ids, k, self.seed)
        ]
        values = {
            "text_offset": [*range(len(ids))],
            "token_logprobs": sampled(ids, self.seed),
            "tokens": [f"{prefix}{i}" for i in ids],
            "top_logprobs": tops,
        }
        choice = {"index": index, "text": "", "logprobs": values, "finish_reason": "length", "stop_reason": None}
        choice |= {"prompt_token_ids": ids, "token_ids": [3]}
        event = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": self.name, "choices": [choice]}
        return event | ({"system_fingerprint": self.fingerprint} if self.fingerprint else {})

    def echo(self, body, spoil=lambda event, index: event, order=None):
        if bad := refusal(body):
            return web.Response(text=stream([{"error": bad}]), content_type="text/event-stream")
        order = range(len(body["prompt"])) if order is None else order
        events = [spoil(self.echo_event(body, index), index) for index in order]
        return web.Response(text=stream(events), content_type="text/event-stream")

    def plain(self, body):
        if bad := refusal(body):
            return web.json_response({"error": bad}, status=400)
        choices = [
            {
                "index": index,
                "prompt_logprobs": [
                    None
                    if position is None
                    else {str(i): {"logprob": value, "rank": 1, "decoded_token": "x"} for i, value in position.items()}
                    for position in top(ids, body["prompt_logprobs"], self.seed)
                ],
            }
            for index, ids in enumerate(body["prompt"])
        ]
        return web.json_response({"model": self.name, "choices": choices, "system_fingerprint": self.fingerprint})


class FakeGpuVllm(FakeVllm):
    """With the route that scores given ids, which a real vLLM offers on a GPU alone."""

    async def _generate(self, request):
        body = await request.json()
        ids, params = body["token_ids"], body["sampling_params"]
        start, wanted = params["prompt_logprob_start"], params["prompt_logprob_token_ids"]
        assert len(wanted) == len(ids) - 1 - start
        if ids != [1, 2, 3, 4, 5, 6, 7, 8]:
            self.asked.append(body)
        table = logprobs(ids, self.seed)
        values = [
            [table[start + i, w] if w >= 0 else -np.inf for w in row]  # row i is position start + i + 1
            for i, row in enumerate(wanted)
        ]
        with io.BytesIO() as buffer:
            np.save(buffer, np.array(values, dtype=np.float32), allow_pickle=False)
            encoded = base64.b64encode(buffer.getvalue()).decode()
        return web.json_response({"model": self.name, "prompt_token_id_logprobs": encoded, "choices": []})


def refusal(body):
    k = body.get("logprobs") if body.get("echo") else body["prompt_logprobs"]
    if k > MAX_LOGPROBS:
        message = f"Requested sample logprobs of {k}, which is greater than max allowed: {MAX_LOGPROBS}"
    elif max(i for ids in body["prompt"] for i in ids) >= VOCAB:
        message = f"Token id {max(i for ids in body['prompt'] for i in ids)} is out of vocabulary"
    elif any(13 in ids for ids in body["prompt"]):
        message = "13 brings bad luck"
    else:
        return None
    return {"message": message, "type": "BadRequestError", "param": None, "code": 400}


def stream(events):
    return "".join(f"data: {json.dumps(event, separators=(',', ':'))}\n\n" for event in events) + "data: [DONE]\n\n"


def error(status, message, headers=None):
    return web.json_response({"error": {"message": message, "code": status}}, status=status, headers=headers)


def busy(status, headers=None):
    async def fault(server, body):
        return error(status, "too much to do", headers)

    return fault


def spoiled(change, index=0):
    """The event of prompt `index` is changed in place by `change(values, choice)`."""

    async def fault(server, body):
        def spoil(event, i):
            if i == index:
                change(event["choices"][0]["logprobs"], event["choices"][0])
            return event

        return server.echo(body, spoil)

    return fault


def raw(change):
    """The text of the good reply is changed by `change(text)`."""

    async def fault(server, body):
        return web.Response(text=change(server.echo(body).text), content_type="text/event-stream")

    return fault


async def in_reverse(server, body):
    return server.echo(body, order=reversed(range(len(body["prompt"]))))


async def without_echo(server, body):
    return error(400, "echo is not supported with stream") if body.get("echo") else None


async def hang(server, body):
    await asyncio.sleep(3600)


async def slow(server, body):
    await asyncio.sleep(0.2)


def until_open(number):
    """Answers when so many requests are on their way at once, and a while later, so that one more would be seen."""

    async def fault(server, body):
        while server.most_open < number:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)

    return fault


def drop_after(num_events):
    """Ends the connection in the middle of the reply, after so many whole events and half of one."""

    class Dropped(web.StreamResponse):
        def __init__(self, begin):
            super().__init__(headers={"Content-Type": "text/event-stream"})
            self.begin = begin

        async def prepare(self, request):
            await super().prepare(request)
            await self.write(self.begin.encode())
            assert request.transport is not None
            request.transport.close()

    async def fault(server, body):
        events = server.echo(body).text.split("\n\n")
        return Dropped("".join(event + "\n\n" for event in events[:num_events]) + events[num_events][:40])

    return fault


ROWS = [
    Row(prompt_ids=(1, 5), completion_ids=(9, 4, 7)),
    Row(prompt_ids=(2,), completion_ids=(3, 8)),
    Row(prompt_ids=(1, 5), completion_ids=(6,)),
]


@pytest.fixture
def start():
    """Starts fake servers, and stops them at the end."""
    servers = []

    def start(server):
        servers.append(server.start())
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def server(start):
    return start(FakeVllm())


@pytest.fixture
def connect():
    """Makes teachers that soon ask again, and closes them at the end."""
    teachers = []

    def connect(*urls, **settings):
        teachers.append(VllmTeacher(urls, **{"timeout_s": 120, "retries": 2, "backoff_s": 0.01, **settings}))
        return teachers[-1]

    yield connect
    for teacher in teachers:
        teacher.close()


def right(row, seed=0):
    return torch.tensor(sampled([*row.prompt_ids, *row.completion_ids], seed)[len(row.prompt_ids) :])


def assert_right(scores, rows=ROWS, but=()):
    for i, row in enumerate(rows):
        length = len(row.completion_ids)
        assert scores.valid_BT[i].tolist() == [t < length and i not in but for t in range(scores.valid_BT.shape[1])]
        if i not in but:
            torch.testing.assert_close(scores.logprob_BT[i, :length], right(row))
    assert (scores.logprob_BT[~scores.valid_BT] == 0).all()
    assert set(scores.failures) == set(but)


def restarted(server, **changes):
    """The server again, on the same port and perhaps with something else; stops with the first one's fixture."""
    server.stop()
    settings = {"name": server.name, "seed": server.seed, "port": server.port, **changes}
    server.__dict__ = FakeVllm(**settings).start().__dict__
    return server
