"""Talk to the policy: the applications behind `/v1/chat/completions` and `/v1/models`. They know HTTP as ASGI has it.

Chats are groups like those of rollouts and share the chain's lanes with them; they are never trained on.
"""

import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
import trio

from echo_node.chat_desk import CHATS_MAX, Desk, Voice
from echo_node.chat_reply import END_OF_STREAM, Reply, fault_event
from echo_node.chat_wire import BODY_MAX_BYTES, Ask, Fault, invalid, read_ask
from echo_p2p.chain.group import GroupRequest
from echo_p2p.errors import ChainError, ModelError
from echo_protocols.values import PolicyVersion

log = logging.getLogger(__name__)

CHAT_TIMEOUT_S = 600.0
_BODY_TIMEOUT_S = 30.0

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_Token = tuple[int, int, PolicyVersion]


class Models:
    """The application behind `/v1/models`."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Answer one request."""
        voice = self._desk.voice
        if voice is None:
            return await _refuse(send, self._desk.closed())
        model = {
            "id": voice.manifest.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "echo",
            "policy_version": str(voice.driver.version),
        }
        await _respond(send, 200, msgspec.json.encode({"object": "list", "data": [model]}))


class Chats:
    """The application behind `/v1/chat/completions`. A client that goes away takes its group along."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Answer one request."""
        body = await _read_body(receive)
        if body is None:
            return
        ask = body if isinstance(body, Fault) else read_ask(_content_type(scope), body)
        if isinstance(ask, Fault):
            return await _refuse(send, ask)
        if (voice := self._desk.voice) is None:
            return await _refuse(send, self._desk.closed())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_when_gone, receive, nursery.cancel_scope)
            fault = await self._converse(ask, voice, send)
            if fault is not None:
                await _refuse(send, fault)
            nursery.cancel_scope.cancel()

    async def _converse(self, ask: Ask, voice: Voice, send: _Send) -> Fault | None:
        """Answer; a fault if nothing has been said yet."""
        try:
            language, request = await voice.language(), await voice.group_of(ask)
        except ModelError as error:
            return Fault(status=503, message=str(error), code="no_model")
        if isinstance(request, Fault):
            return request
        reply = Reply(
            request, voice.manifest.model, voice.driver.engine, decode=language.text, stops=ask.stops, now=time.time()
        )
        drawn, tokens = trio.open_memory_channel[_Token](request.samples * request.sampling.max_new_tokens)
        faults: list[Fault] = []
        with tokens:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._generate, voice, request, drawn, faults)
                if ask.stream:
                    usage = ask.stream_options is not None and bool(ask.stream_options.include_usage)
                    fault = await _tell_events(reply, tokens, faults, send, usage=usage)
                else:
                    fault = await _tell_whole(reply, tokens, faults, send)
                nursery.cancel_scope.cancel()
        return fault

    async def _generate(
        self,
        voice: Voice,
        request: GroupRequest,
        drawn: trio.MemorySendChannel[_Token],
        faults: list[Fault],
    ) -> None:
        """Have the chain answer. Holds a seat, which a client that reads slowly does not."""

        def on_token(sample: int, token: int, version: PolicyVersion) -> None:
            drawn.send_nowait((sample, token, version))

        with drawn:
            try:
                self._desk.seats.acquire_nowait()
            except trio.WouldBlock:
                message = f"{CHATS_MAX} chats are going on here: try again when one has ended."
                faults.append(Fault(status=429, message=message, code="too_many_chats"))
                return
            try:
                with trio.fail_after(CHAT_TIMEOUT_S):
                    await voice.driver.generate(request, on_token)
            except trio.TooSlowError:
                message = f"The chain did not finish in {CHAT_TIMEOUT_S:g} s: ask for fewer tokens, or later."
                faults.append(Fault(status=504, message=message, code="timeout"))
            except ChainError as error:
                log.info("a chat got no answer: %s", error)
                if voice.driver.failed.is_set():
                    faults.append(Fault(status=503, message=f"{error}; ask again.", code="chain_broken"))
                else:
                    faults.append(invalid(f"The chain can't take this: {error}."))
            finally:
                self._desk.seats.release()


async def _tell_whole(
    reply: Reply, tokens: trio.MemoryReceiveChannel[_Token], faults: list[Fault], send: _Send
) -> Fault | None:
    async for token in tokens:
        reply.take(*token)
        if reply.finished:
            break
    if not reply.finished:
        return faults[0]
    await _respond(send, 200, reply.whole(), x_policy_version=str(reply.version))
    return None


async def _tell_events(
    reply: Reply, tokens: trio.MemoryReceiveChannel[_Token], faults: list[Fault], send: _Send, *, usage: bool
) -> Fault | None:
    started = False
    async for token in tokens:
        delta = reply.take(*token)
        if not started:  # not before, so that what fails at once has a status of its own
            await _start(send, 200, "text/event-stream", x_policy_version=str(reply.version))
            started = True
        if delta is not None and (delta.text or delta.first or delta.finish):
            await send({"type": "http.response.body", "body": reply.event(delta), "more_body": True})
        if reply.finished:
            break
    if not started:
        return faults[0]
    last = (reply.usage_event() if usage else b"") if reply.finished else fault_event(faults[0])
    await send({"type": "http.response.body", "body": last + END_OF_STREAM})
    return None


async def _start(send: _Send, status: int, content_type: str, **more: str) -> None:
    headers = {"content-type": content_type, "cache-control": "no-store", "x-content-type-options": "nosniff"}
    headers |= {name.replace("_", "-"): value for name, value in more.items()}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def _respond(send: _Send, status: int, body: bytes, **more: str) -> None:
    await _start(send, status, "application/json", content_length=str(len(body)), **more)
    await send({"type": "http.response.body", "body": body})


async def _refuse(send: _Send, fault: Fault) -> None:
    later = {"retry_after": "5"} if fault.status in (429, 503) else {}
    await _respond(send, fault.status, fault.body(), **later)


def _content_type(scope: _Message) -> str:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == b"content-type"), "")


async def _read_body(receive: _Receive) -> bytes | Fault | None:
    """The body of a request; None if the client leaves before its end."""
    body = bytearray()
    with trio.move_on_after(_BODY_TIMEOUT_S):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > BODY_MAX_BYTES:
                text = f"The request is over {BODY_MAX_BYTES >> 10} KiB: shorten the conversation."
                return Fault(status=413, message=text, code="too_large")
            if not message.get("more_body", False):
                return bytes(body)
    text = f"The request did not arrive in {_BODY_TIMEOUT_S:g} s: send it again."
    return Fault(status=408, message=text, code="timeout")


async def _cancel_when_gone(receive: _Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
