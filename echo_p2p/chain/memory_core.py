"""The engine that batches continuously, over any stage that is a whole model: one lane for each answer.

It stands in for vLLM where the process and its loop are what matters. Knows no process.
"""

import socket
import threading
from collections.abc import Callable

import numpy as np

from echo_p2p.chain.group import GroupRequest
from echo_p2p.chain.sampler import draw
from echo_p2p.chain.stage import Stage
from echo_p2p.chain.vllm_loop import Begun, Core, serve
from echo_p2p.chain.vllm_wire import Load, Token, WorkerPipe
from echo_protocols.uniform import uniforms
from echo_protocols.values import PolicyVersion

_BLOCK = 16
_ROW = np.zeros(1, np.int32)


class MemoryCore:
    """A `Core`. Answers that have drawn nothing have read nothing either, so a new version needs no care."""

    def __init__(self, stage: Stage, blocks: int = 1 << 16) -> None:
        self.engine = stage.engine
        self.weights = stage
        self.blocks = blocks, _BLOCK
        self._stage = stage
        self._requests: dict[int, GroupRequest] = {}
        self._tokens: dict[tuple[int, int], list[int]] = {}  # of an answer, by number and sample
        self._unread: dict[tuple[int, int], list[int]] = {}  # what the next step begins with
        self._lanes: dict[tuple[int, int], int] = {}  # of the answers that grow, by number and sample
        self._lanes_begun = 0

    @property
    def busy(self) -> bool:
        """Whether there are answers that grow."""
        return bool(self._lanes)

    def add(self, number: int, request: GroupRequest, begun: Begun) -> None:
        """Let these answers to a prompt grow."""
        self._requests[number] = request
        for sample, tokens in begun.items():
            self._tokens[number, sample] = list(tokens)
            self._unread[number, sample] = [*request.prompt, *tokens]
            self._lanes_begun += 1
            self._lanes[number, sample] = self._lanes_begun

    def drop(self, number: int) -> None:
        """End them; unknown numbers are no error."""
        self._requests.pop(number, None)
        for place in [place for place in self._lanes if place[0] == number]:
            self._end(place)

    def renew(self, version: PolicyVersion) -> None:
        """Nothing is cached for later prompts."""

    def step(self) -> list[Token]:
        """A token more for every answer."""
        return [self._grow(number, sample, lane) for (number, sample), lane in list(self._lanes.items())]

    def _grow(self, number: int, sample: int, lane: int) -> Token:
        request, tokens, inputs = self._requests[number], self._tokens[number, sample], self._unread[number, sample]
        position = np.array([len(request.prompt) + len(tokens) - len(inputs)], np.int32)
        logits = self._stage.forward(lane, _ROW, position, np.array([inputs], np.int32))
        chance = np.array(uniforms(request.run_seed, request.group_id, [sample], len(tokens)))
        (token,), (logprob,) = draw(logits, chance, request.sampling)
        tokens.append(int(token))
        self._unread[number, sample] = tokens[-1:]
        if token in request.stop_tokens or len(tokens) == request.sampling.max_new_tokens:
            self._end((number, sample))
        return Token(number, sample, int(token), float(logprob))

    def _end(self, place: tuple[int, int]) -> None:
        self._stage.close(self._lanes.pop(place))
        del self._tokens[place], self._unread[place]
        if not any(number == place[0] for number, _ in self._lanes):
            self._requests.pop(place[0], None)


def start_thread(load_core: Callable[[Load], Core]) -> Callable[[socket.socket], Callable[[], None]]:
    """What starts an engine in a thread of this process, for `open_process`."""

    def start(end: socket.socket) -> Callable[[], None]:
        own = end.dup()

        def run() -> None:
            with own:
                serve(WorkerPipe(own), load_core)

        thread = threading.Thread(target=run, name="engine", daemon=True)
        thread.start()
        return thread.join

    return start
