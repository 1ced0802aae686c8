"""Talking to the policy over the real port: OpenAI's shapes, versions in the reply, and no harm to rollouts."""

import http.client
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from echo_node.api import bind, build_app, serve_http
from echo_node.chat_desk import CHATS_MAX, Desk, Voice, elsewhere
from echo_node.chat_text import Words
from echo_node.chat_wire import BODY_MAX_BYTES, Ask, Bounds, Fault, group_of, read_ask
from echo_node.state import NodeState
from echo_p2p.chain.driver import ChainDriver, open_chain
from echo_p2p.chain.group import GroupRequest
from echo_p2p.chain.host import StageHost
from echo_p2p.chain.link import ChainLimits
from echo_p2p.chain.memory_stage import MemoryStage, MemoryWeights
from echo_p2p.chain.ring import Ring
from echo_p2p.models import encode_chat, load_tokenizer, longest_sequence, resolve_model
from echo_p2p.tensors import TensorUpdate
from echo_protocols.peer import Plan, Stop
from echo_protocols.rollout import Sample
from echo_protocols.run import RunManifest, Sampling
from echo_protocols.values import PolicyVersion, Span

PEER, OTHER = "A" * 44, "B" * 44
V0, V1 = PolicyVersion(epoch=0, step=0), PolicyVersion(epoch=0, step=1)
WHOLE = Span(start=0, end=4, layers=4)
VOCABULARY = 100  # the tiny model's
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
MANIFEST = RunManifest(
    swarm="s", model="tiny", tokenizer_hash=bytes(32), layers=4, vocabulary=VOCABULARY, stop_tokens=(2,),
    trainers=(PEER,), sampling=Sampling(max_new_tokens=24),
)  # fmt: skip
STATE = NodeState(peer=PEER, role="inference", swarm="s", software="test", pid=1, started_at=0.0, now=1.0)


class Gated(MemoryStage):
    """A stage that stops before each step once `free` of them are taken, until somebody allows more."""

    def __init__(self, free: int) -> None:
        super().__init__(WHOLE, vocabulary=VOCABULARY)
        self.allowed = threading.Semaphore(free)

    def forward(
        self,
        lane: int,
        rows: NDArray[np.int32],
        positions: NDArray[np.int32],
        inputs: NDArray[np.int32] | NDArray[np.float32],
    ) -> NDArray[np.float32]:
        assert self.allowed.acquire(timeout=20)
        return super().forward(lane, rows, positions, inputs)


@dataclass
class Scene:
    port: int
    driver: ChainDriver
    desk: Desk

    async def ask(self, **ask: Any) -> "Answer":
        return await post(self.port, msgspec.json.encode({**HELLO, **ask}))


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def texts(self) -> list[str]:
        return [choice["message"]["content"] for choice in self.document["choices"]]

    @property
    def events(self) -> list[Any]:
        events = self.body.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [msgspec.json.decode(event.removeprefix("data: ")) for event in events[:-2]]

    @property
    def error(self) -> str:
        return str(self.document["error"]["message"])


def talking(check: Callable[[Scene], Awaitable[None]], stage: MemoryStage | None = None, **limits: int) -> None:
    """Run `check` against the port of a peer that heads a chain of one."""

    async def main() -> None:
        with trio.fail_after(30):
            async with chain(stage or MemoryStage(WHOLE, vocabulary=VOCABULARY), **limits) as driver:
                desk = Desk(lambda: "not here")
                with desk.lend(Voice(driver, MANIFEST, resolve_model("tiny"))):
                    async with serving(desk) as port:
                        await check(Scene(port, driver, desk))

    trio.run(main)


@asynccontextmanager
async def chain(stage: MemoryStage, **limits: int) -> AsyncIterator[ChainDriver]:
    ring = Ring((Stop(peer=PEER, span=WHOLE),), bytes(32), lanes=2, rows=8)
    head = np.full((16, VOCABULARY), 0x3F80, np.uint16)  # ones: another policy altogether
    weights = MemoryWeights({V1: {"lm_head.weight": TensorUpdate(None, head)}})
    host = StageHost(PEER, stage, weights, V0, limits=ChainLimits(**limits))
    async with open_chain(ring, host, canary=False) as driver:
        yield driver


@asynccontextmanager
async def serving(desk: Desk) -> AsyncIterator[int]:
    async with trio.open_nursery() as nursery:
        yield await nursery.start(serve_http, build_app(lambda: STATE, desk), "127.0.0.1", 0)
        nursery.cancel_scope.cancel()


def test_an_answer_has_openais_shape_and_names_the_policy() -> None:
    async def check(scene: Scene) -> None:
        answer = await scene.ask(model="tiny", max_tokens=12, n=3, temperature=0.7, top_p=0.9, seed=5)
        assert answer.status == 200
        assert answer.headers["x-policy-version"] == "0.0"
        assert "access-control-allow-origin" not in answer.headers
        document = answer.document
        assert document["object"] == "chat.completion"
        assert document["model"] == "tiny@0.0"
        assert document["policy_version"] == "0.0"
        assert [choice["index"] for choice in document["choices"]] == [0, 1, 2]
        for choice in document["choices"]:
            assert choice["message"]["role"] == "assistant"
            assert choice["finish_reason"] in ("stop", "length")
            assert choice["segments"] == [{"start": 0, "policy_version": "0.0"}]
        usage = document["usage"]
        assert usage["prompt_tokens"] == len("hello")
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]

    talking(check)


def test_a_stream_says_what_the_whole_answer_says() -> None:
    async def check(scene: Scene) -> None:
        whole = await scene.ask(n=2, seed=7)
        streamed = await scene.ask(n=2, seed=7, stream=True, stream_options={"include_usage": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        *events, usage = streamed.events
        texts, finishes = ["", ""], {}
        for event in events:
            assert event["object"] == "chat.completion.chunk"
            choice = event["choices"][0]
            texts[choice["index"]] += choice["delta"]["content"]
            if choice["finish_reason"]:
                finishes[choice["index"]] = choice["finish_reason"]
        assert texts == whole.texts
        assert finishes == {each["index"]: each["finish_reason"] for each in whole.document["choices"]}
        assert usage["usage"] == whole.document["usage"]
        assert len(events) > 4

    talking(check)


def test_a_seed_decides_the_answer_and_without_one_it_differs() -> None:
    async def check(scene: Scene) -> None:
        assert (await scene.ask(seed=1)).texts == (await scene.ask(seed=1)).texts
        assert (await scene.ask()).texts != (await scene.ask()).texts
        greedy = [(await scene.ask(temperature=0, seed=seed)).texts for seed in (1, 2)]
        assert greedy[0] == greedy[1]
        tiniest = await scene.ask(temperature=5e-324, seed=3)
        assert tiniest.texts == greedy[0]

    talking(check)


def test_a_stop_string_ends_an_answer_before_it() -> None:
    async def check(scene: Scene) -> None:
        full = (await scene.ask(seed=11, max_tokens=40)).texts[0]
        stop = full[5:7]
        answer = await scene.ask(seed=11, max_tokens=40, stop=[stop, "never said"])
        assert answer.texts == [full[: full.index(stop)]]
        assert answer.document["choices"][0]["finish_reason"] == "stop"
        while scene.driver.statistics.lanes:  # the group does not go on
            await trio.lowlevel.checkpoint()

    talking(check)


def test_a_switch_in_mid_answer_shows_in_the_reply() -> None:
    stage = Gated(free=8)

    async def check(scene: Scene) -> None:
        answers: list[Answer] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, partial(scene.ask, stream=True, seed=3, max_tokens=40), answers)
            while scene.driver.statistics.tokens < 8:
                await trio.lowlevel.checkpoint()
            nursery.start_soon(scene.driver.switch, V1, 10.0)
            stage.allowed.release(100)
        events = answers[0].events
        assert answers[0].headers["x-policy-version"] == "0.0"
        assert (events[0]["model"], events[-1]["model"]) == ("tiny@0.0", "tiny@0.1")
        first, second = events[-1]["choices"][0]["segments"]
        assert (first["start"], first["policy_version"]) == (0, "0.0")
        assert 8 <= second["start"] <= 10
        assert second["policy_version"] == "0.1"
        assert (await scene.ask(max_tokens=1)).document["model"] == "tiny@0.1"

    talking(check, stage)


def test_chats_amid_rollouts_change_none_of_their_tokens() -> None:
    groups = [
        GroupRequest(
            group_id=b"group %d" % number,
            run_seed=b"seed",
            prompt=(1, 2, 3 + number),
            samples=1 + number % 5,
            sampling=Sampling(max_new_tokens=(4, 60, 9, 25)[number % 4]),
            stop_tokens=frozenset({2}),
        )
        for number in range(12)
    ]

    async def all_groups(driver: ChainDriver) -> list[tuple[Sample, ...]]:
        answers: list[tuple[Sample, ...]] = [()] * len(groups)

        async def one(place: int) -> None:
            answers[place] = await driver.generate(groups[place])

        async with trio.open_nursery() as nursery:
            for place in range(len(groups)):
                nursery.start_soon(one, place)
        return answers

    async def check(scene: Scene) -> None:
        alone = await all_groups(scene.driver)
        chats: list[Answer] = []
        async with trio.open_nursery() as nursery:
            for number in range(CHATS_MAX):
                nursery.start_soon(collect, partial(scene.ask, n=2, max_tokens=30, seed=number), chats)
            while len(chats) < CHATS_MAX:
                assert await all_groups(scene.driver) == alone
        assert all(chat.status == 200 for chat in chats)

    talking(check)


def test_a_client_that_goes_away_takes_its_group_along() -> None:
    stage = Gated(free=5)

    async def check(scene: Scene) -> None:
        for stream in (True, False):
            await leave_early(scene, stage, stream=stream)
            while scene.driver.statistics.lanes or scene.desk.seats.value < CHATS_MAX:
                stage.allowed.release()
                await trio.lowlevel.checkpoint()
            stage.allowed.release(50)
            assert (await scene.ask(max_tokens=3)).status == 200
            while stage.allowed.acquire(blocking=False):
                pass
            stage.allowed.release(5)
        assert scene.driver.statistics.groups == 2

    talking(check, stage)


async def leave_early(scene: Scene, stage: Gated, *, stream: bool) -> None:
    before = scene.driver.statistics.tokens
    body = msgspec.json.encode({**HELLO, "stream": stream, "max_tokens": 400})
    connection = await trio.open_tcp_stream("127.0.0.1", scene.port)
    await connection.send_all(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    while scene.driver.statistics.tokens < before + 4:
        await trio.lowlevel.checkpoint()
    await trio.aclose_forcefully(connection)


def test_only_so_many_chats_at_a_time() -> None:
    stage = Gated(free=0)

    async def check(scene: Scene) -> None:
        chats: list[Answer] = []
        async with trio.open_nursery() as nursery:
            for _ in range(CHATS_MAX):
                nursery.start_soon(collect, partial(scene.ask, max_tokens=2), chats)
            while scene.desk.seats.value:
                await trio.lowlevel.checkpoint()
            refused = await scene.ask(stream=True)
            assert refused.status == 429
            assert "try again" in refused.error
            assert not chats
            stage.allowed.release(100)
        assert [chat.status for chat in chats] == [200] * CHATS_MAX

    talking(check, stage)


@pytest.mark.parametrize(
    ("ask", "status", "words"),
    [
        ({"model": "gpt-4"}, 404, "ask for 'tiny'"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": ""}]}, 400, "say nothing"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "role"),
        ({"messages": [{"role": "user", "content": "a" * 600}]}, 400, "room for 512"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]}, 400, "image_url"),
        ({"max_tokens": 5000}, 400, "lower max_tokens"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"n": 9}, 400, "takes up to 8"),
        ({"n": 8, "max_tokens": 400}, 400, "room"),
        ({"temperature": 2.5}, 400, "temperature"),
        ({"stop": ""}, 400, "stop"),
        ({"tools": [{"type": "function"}]}, 400, "`tools` is not served"),
        ({"logprobs": True}, 400, "`logprobs`"),
    ],
)
def test_what_can_not_be_answered_is_refused_in_a_sentence(ask: dict[str, Any], status: int, words: str) -> None:
    async def check(scene: Scene) -> None:
        for stream in (False, True):
            answer = await scene.ask(**ask, stream=stream)
            assert answer.status == status
            assert words in answer.error
            assert answer.document["error"]["type"] == "invalid_request_error"

    talking(check, room=3000)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system can't cut off who reads nothing")
def test_a_client_that_reads_nothing_is_cut_off_by_the_system() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


def test_bodies_that_are_no_json_of_ours_are_refused() -> None:
    async def check(scene: Scene) -> None:
        assert (await post(scene.port, b"{")).status == 400
        half = b'{"messages": [{"role": "user", "content": "\\ud800"}], "model": "\\ud800"}'
        assert (await post(scene.port, half)).status == 400
        assert (await post(scene.port, b"[" * 100_000)).status == 400
        assert (await post(scene.port, b" " * (BODY_MAX_BYTES + 1))).status == 413
        # what a page of another origin can send without asking first
        assert (await post(scene.port, msgspec.json.encode(HELLO), content_type="text/plain")).status == 415
        assert (await post(scene.port, msgspec.json.encode(HELLO), host="evil.example")).status == 403
        assert (await scene.ask(max_tokens=1)).status == 200

    talking(check)


def test_models_are_listed_with_the_policy_version() -> None:
    async def check(scene: Scene) -> None:
        (model,) = (await call(scene.port, "GET", "/v1/models")).document["data"]
        assert (model["id"], model["object"], model["policy_version"]) == ("tiny", "model", "0.0")
        assert (await scene.ask(model="tiny@0.0", max_tokens=1)).status == 200

    talking(check)


def test_a_peer_that_heads_no_chain_says_who_does() -> None:
    halves = (Span(start=0, end=2, layers=4), Span(start=2, end=4, layers=4))
    heads = (Stop(peer=OTHER, span=halves[0]), Stop(peer=PEER, span=halves[1]))
    plan = Plan(number=1, layers=4, chains=(heads,))
    assert "a plan" in elsewhere(None, PEER)
    assert "not open" in elsewhere(plan, OTHER)
    assert f"drives no chain; ask at the HTTP port of a peer that heads one: {OTHER}" in elsewhere(plan, "C" * 44)

    async def main() -> None:
        async with serving(Desk(lambda: elsewhere(plan, PEER))) as port:
            for answer in (await post(port, msgspec.json.encode(HELLO)), await call(port, "GET", "/v1/models")):
                assert answer.status == 503
                assert f"the chain's head, peer {OTHER}" in answer.error

    trio.run(main)


def test_a_chain_that_breaks_is_said_with_its_reason() -> None:
    class Breaks(Gated):
        def forward(self, *args: Any) -> NDArray[np.float32]:
            if not self.allowed.acquire(blocking=False):
                raise RuntimeError("out of luck")
            return MemoryStage.forward(self, *args)

    async def at_once(scene: Scene) -> None:
        answer = await scene.ask(stream=True)
        assert answer.status == 503
        assert "out of luck" in answer.error

    async def later(scene: Scene) -> None:
        *_, last = (await scene.ask(stream=True, seed=3)).events
        assert "out of luck" in last["error"]["message"]

    talking(at_once, Breaks(free=0))
    talking(later, Breaks(free=5))


def test_a_chain_that_is_closed_ends_its_chats() -> None:
    stage = Gated(free=4)

    async def main() -> None:
        desk, answers = Desk(lambda: "not here"), list[Answer]()
        with trio.fail_after(30):
            async with serving(desk) as port, trio.open_nursery() as nursery:
                async with chain(stage) as driver:
                    with desk.lend(Voice(driver, MANIFEST, resolve_model("tiny"))):
                        nursery.start_soon(collect, partial(Scene(port, driver, desk).ask), answers)
                        while driver.statistics.tokens < 3:
                            await trio.lowlevel.checkpoint()
                        stage.allowed.release(100)
                while not answers:
                    await trio.lowlevel.checkpoint()
                assert answers[0].status == 503
                assert "closed the chain" in answers[0].error
                assert (await post(port, msgspec.json.encode(HELLO))).error == "not here"
                assert desk.seats.value == CHATS_MAX

    trio.run(main)


def test_a_conversation_without_a_template_is_put_end_to_end() -> None:
    tokenizer = load_tokenizer("tiny")
    turns = [{"role": "system", "content": "ab"}, {"role": "user", "content": "c"}]
    assert encode_chat(tokenizer, turns) == tokenizer("abc")["input_ids"]
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}>"
    assert encode_chat(tokenizer, turns) == tokenizer("sabuc>")["input_ids"]
    assert longest_sequence("tiny") == 512


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(sorted(Ask.__struct_fields__))


@given(st.dictionaries(FIELDS, JSON), st.booleans())
@settings(max_examples=300, deadline=None)
def test_hostile_bodies_are_asks_or_faults_and_nothing_else(fields: dict[str, Any], whole: bool) -> None:
    body = msgspec.json.encode({**HELLO, **fields} if whole else fields)
    ask = read_ask("application/json", body)
    if isinstance(ask, Ask):
        request = group_of(ask, (1, 2), MANIFEST, Bounds(samples=8, positions=64))
        if isinstance(request, GroupRequest):
            assert request.positions <= 64
            assert 1 <= request.samples <= 8
            assert msgspec.convert(msgspec.to_builtins(request.sampling), Sampling) == request.sampling
            return
        ask = request
    assert isinstance(ask, Fault)
    assert 400 <= ask.status < 500
    assert msgspec.json.decode(ask.body())["error"]["message"]


@given(st.binary(max_size=200))
def test_bytes_that_are_anything_are_read_without_harm(body: bytes) -> None:
    assert isinstance(read_ask("application/json", body), Fault)


def as_text(tokens: Any) -> str:
    return bytes(tokens).decode(errors="replace")


@given(st.text(max_size=30) | st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
@settings(deadline=None)
def test_only_whole_characters_are_said_and_nothing_from_a_stop_on(text: str, stops: list[str]) -> None:
    data = text.encode()
    words = Words(as_text, stops)
    said = ""
    for token in data:
        said += words.add(token)
        assert text.startswith(said)
        if words.stopped:
            break
    else:
        said += words.end()
    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    assert words.stopped == bool(ends)
    assert said == (text[: min(ends)[1]] if ends else text)


@given(st.binary(max_size=40))
def test_bytes_that_are_no_text_are_said_as_the_whole_would_be(data: bytes) -> None:
    words = Words(as_text)
    assert "".join([*(words.add(token) for token in data), words.end()]) == as_text(data)


async def collect(ask: Callable[[], Awaitable[Answer]], into: list[Answer]) -> None:
    into.append(await ask())


async def post(
    port: int, body: bytes, *, content_type: str = "application/json; charset=utf-8", host: str = "localhost"
) -> Answer:
    headers = {"Host": host, "Content-Type": content_type}
    return await call(port, "POST", "/v1/chat/completions", headers, body)


async def call(
    port: int, method: str, path: str, headers: dict[str, str] | None = None, body: bytes | None = None
) -> Answer:
    def talk() -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request(method, path, body, headers or {"Host": "localhost"})
        response = connection.getresponse()
        answer = Answer(
            response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        )
        connection.close()
        return answer

    return await trio.to_thread.run_sync(talk)
