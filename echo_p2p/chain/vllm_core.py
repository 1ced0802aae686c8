"""The engine's process: vLLM, stepped by us, with our sampler in it. Knows no node and no release.

`python -m echo_p2p.chain.vllm_core FD` serves the node at the other end of a socket, and ends with it.
"""

# vLLM runs in this very process and thread, with neither a core process of its own nor steps scheduled ahead: so a
# step is a call, what was drawn before a change of weights is known exactly, and the sampler sees whose rows it draws.
# A prompt's cached blocks carry the version in their salt: blocks of other weights are never taken up.

import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import vllm
import vllm._custom_ops
from numpy.typing import NDArray
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from echo_p2p.chain.group import GroupRequest
from echo_p2p.chain.vllm_loop import Begun, serve
from echo_p2p.chain.vllm_proof import prove
from echo_p2p.chain.vllm_sampler import Chance, PublicSampler
from echo_p2p.chain.vllm_weights import whole_weights
from echo_p2p.chain.vllm_wire import Load, Token, WorkerPipe
from echo_p2p.errors import ModelError
from echo_protocols.run import Sampling
from echo_protocols.uniform import uniform
from echo_protocols.values import PolicyVersion

VERSIONS = ("0.32.",)
"""Those whose sampler and model runner we know; private parts of any other may lie elsewhere."""

_SCORE = -1
"""The number of what is only scored."""


class VllmCore:
    """A `Core` over vLLM. Bounded by what the node asks for: it never asks for more than there are blocks."""

    def __init__(
        self, engine: LLMEngine, weights: Any, name: str, sampler: type[PublicSampler] = PublicSampler
    ) -> None:
        self.engine = name
        self.weights = weights
        self._vllm = engine
        self._runner = runner_of(engine)
        self._runner.sampler = sampler(self._chances)
        self._requests: dict[int, tuple[GroupRequest, Begun]] = {}
        self._undrawn: dict[str, tuple[int, int]] = {}  # by request, what has drawn nothing yet: number and sample
        self._growing: dict[str, tuple[int, int]] = {}
        self._salt = "unknown"

    @property
    def blocks(self) -> tuple[int, int]:
        """How many blocks of keys and values there are, and positions of each."""
        cache, groups = self._vllm.vllm_config.cache_config, len(self._runner.kv_cache_config.kv_cache_groups)
        # The first one is vLLM's own; layers of several kinds take a block each.
        return (int(cache.num_gpu_blocks) - 1) // max(1, groups), int(cache.block_size)

    @property
    def busy(self) -> bool:
        """Whether there are answers that grow or wait."""
        return bool(self._growing)

    def add(self, number: int, request: GroupRequest, begun: Begun) -> None:
        """Let these answers to a prompt grow."""
        self._requests[number] = request, begun
        for sample in begun:
            self._begin(number, sample)

    def _begin(self, number: int, sample: int) -> None:
        request, begun = self._requests[number]
        params = SamplingParams(
            max_tokens=request.sampling.max_new_tokens - len(begun[sample]),
            stop_token_ids=sorted(request.stop_tokens),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"echo": (number, sample)},
        )
        name = f"{number}.{sample}"
        self._growing[name] = self._undrawn[name] = number, sample
        prompt = [*request.prompt, *begun[sample]]
        self._vllm.add_request(name, {"prompt_token_ids": prompt, "cache_salt": self._salt}, params)

    def drop(self, number: int) -> None:
        """End its answers; unknown numbers are no error."""
        _, begun = self._requests.pop(number, (None, {}))
        names = [f"{number}.{sample}" for sample in begun]
        self._vllm.abort_request([name for name in names if name in self._growing])
        for name in names:
            self._growing.pop(name, None)
            self._undrawn.pop(name, None)

    def renew(self, version: PolicyVersion) -> None:
        """The weights are of `version` now: answers that have begun keep their KV, prompts are read anew."""
        self._salt = str(version)
        undrawn = dict(self._undrawn)
        self._vllm.abort_request(list(undrawn))
        for number, sample in undrawn.values():
            self._begin(number, sample)

    def step(self) -> list[Token]:
        """A token more for as many answers as there is room for. Raises ChainError."""
        drawn = []
        for output in self._vllm.step():
            if (place := self._growing.get(output.request_id)) is None:
                continue
            self._undrawn.pop(output.request_id, None)
            (completion,) = output.outputs
            for token, chosen in zip(completion.token_ids, completion.logprobs or (), strict=True):
                drawn.append(Token(*place, token, chosen[token].logprob))
            if output.finished:
                self._end(output.request_id, place[0])
        return drawn

    def _end(self, name: str, number: int) -> None:
        del self._growing[name]
        if not any(other == number for other, _ in self._growing.values()):
            self._requests.pop(number, None)

    def _chances(self, rows: int) -> Sequence[Chance]:
        """How the next tokens of the batch that vLLM computes now are drawn."""
        batch = self._runner.input_batch
        return [self._chance(batch.req_ids[i], batch.req_output_token_ids[i]) for i in range(rows)]

    def _chance(self, name: str, so_far: Sequence[int] | None) -> Chance:
        number, sample = self._runner.requests[name].sampling_params.extra_args["echo"]
        request, begun = self._requests[number]
        position = len(begun[sample]) + len(so_far or ())
        return Chance(uniform(request.run_seed, request.group_id, sample, position), request.sampling)

    def score(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        """Log-probabilities (tokens - 1, vocabulary) of what follows each token: from vLLM, not from our sampler."""
        assert not self.busy
        alone = GroupRequest(b"", b"", tuple(tokens), 1, Sampling(max_new_tokens=1), frozenset())
        self._requests[_SCORE] = alone, {0: ()}
        params = SamplingParams(
            max_tokens=1, prompt_logprobs=-1, flat_logprobs=True, detokenize=False, extra_args={"echo": (_SCORE, 0)}
        )
        self._vllm.add_request(str(_SCORE), {"prompt_token_ids": list(tokens)}, params)
        scores = np.empty((len(tokens) - 1, self._vllm.model_config.get_vocab_size()))
        while self._vllm.has_unfinished_requests():
            for output in self._vllm.step():
                said = output.prompt_logprobs
                for i in range(1, len(tokens)):
                    place = slice(said.start_indices[i], said.end_indices[i])
                    scores[i - 1, said.token_ids[place]] = said.logprobs[place]
        del self._requests[_SCORE]
        return scores


def runner_of(engine: LLMEngine) -> Any:
    """vLLM's model runner. Raises ModelError if it is not the one whose sampler we know how to replace."""
    try:
        runner = engine.model_executor.driver_worker.worker.model_runner
        if runner.use_async_scheduling or not callable(runner.sampler.topk_topp_sampler):
            raise AttributeError("it schedules ahead")
        assert isinstance(runner.requests, dict)
        assert runner.input_batch.req_ids == []
    except (AttributeError, AssertionError) as error:
        raise ModelError(f"this vllm has another model runner than we know ({error}): choose --engine torch") from error
    return runner


def load_core(load: Load, sampler: type[PublicSampler] = PublicSampler) -> VllmCore:
    """vLLM with the model, proven to draw as we do. Raises ModelError."""
    if not vllm.__version__.startswith(VERSIONS):
        raise ModelError(
            f"vllm {vllm.__version__} is installed, and the vllm engine knows {VERSIONS[0]}*: "
            "run pip install 'echo-p2p[vllm]', or choose --engine torch"
        )
    cpu = load.device == "cpu"
    if cpu:
        # With oneDNN linear layers compute from packed copies of their weights, which no patch would reach.
        vllm._custom_ops._supports_onednn = False
    arguments = EngineArgs(
        model=load.model,
        skip_tokenizer_init=True,
        dtype="float32" if cpu else "bfloat16",
        max_model_len=load.positions,
        max_num_seqs=load.rows,
        enforce_eager=cpu,
        seed=0,
        kv_cache_memory_bytes=load.kv_bytes if cpu else None,
        gpu_memory_utilization=load.memory_share,
        enable_prefix_caching=True,
        async_scheduling=False,
        logprobs_mode="processed_logprobs",
        distributed_executor_backend="uni",
        generation_config="vllm",
        disable_log_stats=True,
        max_logprobs=-1,
    )
    try:
        engine = LLMEngine.from_engine_args(arguments)
    except (ValueError, RuntimeError, OSError, KeyError, TypeError, NotImplementedError) as error:  # of the vendor
        raise ModelError(f"vllm can't hold {load.model} ({error}): choose --engine torch") from error
    runner = runner_of(engine)
    model = runner.get_model()
    weights = whole_weights(model, getattr(model, "packed_modules_mapping", {}), Path(load.model))
    name = f"vllm-{vllm.__version__.split('+')[0]}-{load.device}-{arguments.dtype}"
    core = VllmCore(engine, weights, name, sampler)
    prove(core, vocabulary=engine.model_config.get_vocab_size(), tolerance=1e-3 if cpu else 0.1)
    return core


def main() -> None:
    """Serve until the node is gone."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    os.dup2(2, 1)  # the node's stdout is for answers
    serve(WorkerPipe(socket.socket(fileno=int(sys.argv[1]))), load_core)


if __name__ == "__main__":
    main()
