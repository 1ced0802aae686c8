"""The HTTP port of a node, asked over real sockets, and the text that `status` and `peers` print."""

import http.client
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, RenderableType
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from echo_node.api import bind, build_app, host_is_ours, serve_http
from echo_node.places import Places
from echo_node.state import Event, InferenceView, NodeState, PeerView, RunView, TrainerView, Whereabouts
from echo_node.status import (
    decode_state,
    fetch_state,
    print_peers,
    print_status,
    read_whereabouts,
    render_peers,
    render_status,
)
from echo_p2p.errors import ConfigError, Unreachable

STATE = NodeState(
    peer="12D3KooWtrainer",
    role="trainer",
    swarm="demo",
    software="echo-p2p 0.1.0",
    pid=42,
    started_at=1000.0,
    now=1060.0,
    connected=True,
    join_line="echo-node join --role inference --peer /ip4/127.0.0.1/tcp/4000/p2p/12D3KooWtrainer" + "x" * 80,
    run=RunView(
        run_id="ab" * 32,
        model="tiny",
        task="sokoban",
        algorithm="grpo",
        protocol="async",
        max_lag=4,
        group_size=8,
        groups_per_step=8,
    ),
    peers=(
        PeerView(peer="12D3KooWtrainer", role="trainer", ours=True),
        PeerView(peer="12D3KooWworker", role="inference", span="0–2", version="0.3", tokens_per_s=120.0, device="cpu"),
    ),
    trainer=TrainerView(
        step=3,
        version="0.3",
        reward_history=(0.1, 0.2, 0.3),
        lag_histogram={0: 10, 2: 5},
        lag_max=2,
        release_bytes=(1000, 3000),
        model_bytes_bf16=1_000_000,
        idle_share=0.25,
        rollouts_by_peer={"12D3KooWworker": 15},
        figures={"k3_kl": 0.01},
        advice="trainer idle 25 %: about 1 more peer like the median would fill it",
    ),
    refused={"wrong signature": 2},
    events=(Event(at=1050.0, text="peer joined"),),
)


def test_state_is_the_whole_document() -> None:
    async def check(port: int) -> None:
        status, headers, body = await _get(port, "/state")
        assert status == 200
        assert headers["content-type"] == "application/json"
        assert "access-control-allow-origin" not in headers
        assert decode_state(body) == STATE

    _serving(check)


def test_metrics_are_prometheus_text_with_base_units() -> None:
    async def check(port: int) -> None:
        status, _, body = await _get(port, "/metrics")
        assert status == 200
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(body.decode())
            for sample in family.samples
        }
        assert all(name.startswith("echo_") for name, *_ in samples)
        assert samples["echo_trainer_step",] == 3.0
        assert samples["echo_trainer_reward_mean",] == 0.3
        assert samples["echo_trainer_groups_total", "2"] == 5.0
        assert samples["echo_refused_total", "wrong signature"] == 2.0
        assert samples["echo_peer_tokens_per_second", "12D3KooWworker"] == 120.0
        assert samples["echo_peers", "inference"] == 1.0

    _serving(check)


def test_metrics_of_an_inference_peer_count_its_tokens() -> None:
    view = InferenceView(tokens=900, tokens_per_s=30.0, activity="generating")
    state = msgspec.structs.replace(STATE, role="inference", trainer=None, inference=view)

    async def check(port: int) -> None:
        _, _, body = await _get(port, "/metrics")
        assert b"echo_inference_tokens_total 900.0" in body
        assert b'echo_inference_activity{activity="generating"} 1.0' in body

    _serving(check, state)


def test_health_is_503_while_the_node_is_not_connected() -> None:
    async def connected(port: int) -> None:
        assert (await _get(port, "/health"))[0] == 200

    async def alone(port: int) -> None:
        status, _, body = await _get(port, "/health")
        assert status == 503
        assert msgspec.json.decode(body) == {"healthy": False, "note": "no bootstrap reachable; trying again"}

    _serving(connected)
    note = "no bootstrap reachable; trying again"
    _serving(alone, msgspec.structs.replace(STATE, connected=False, network_note=note))


def test_the_dashboard_may_load_nothing_from_elsewhere() -> None:
    async def check(port: int) -> None:
        status, headers, body = await _get(port, "/")
        assert status == 200
        assert "default-src 'none'" in headers["content-security-policy"]
        page = body.decode()
        assert "innerHTML" not in page  # text of strangers is only ever set as text
        links = page.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in links
        assert "https://" not in links
        assert 'src="' not in links

    _serving(check)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost:80@evil"])
def test_a_page_under_another_name_is_refused(host: str) -> None:
    async def check(port: int) -> None:
        status, _, body = await _get(port, "/state", host=host)
        assert status in (400, 403)
        assert b"trainer" not in body

    _serving(check)


def test_hosts_that_name_this_machine() -> None:
    for header in ("localhost", "localhost:8000", "LOCALHOST", "127.0.0.1:1", "[::1]:8000", "[::1]"):
        assert host_is_ours(header, "127.0.0.1"), header
    assert host_is_ours("node.lan:80", "node.lan")
    assert not host_is_ours("192.168.1.5", "127.0.0.1")
    assert host_is_ours("192.168.1.5:80", "0.0.0.0")
    assert not host_is_ours("node.evil", "0.0.0.0")
    assert not host_is_ours("", "")


def test_a_taken_port_is_one_sentence_with_the_flag() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"HTTP port {port} on 127.0.0.1 is taken .* --http-port"):
            bind("127.0.0.1", port)


def test_an_address_of_another_machine_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"network\.http_host"):
        bind("192.0.2.1", 0)


def test_an_error_behind_one_request_leaves_the_port_serving() -> None:
    calls: Iterator[NodeState | ValueError] = iter([ValueError("broken"), STATE])

    def read_state() -> NodeState:
        answer = next(calls)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            port = await nursery.start(serve_http, build_app(read_state), "127.0.0.1", 0)
            assert (await _get(port, "/state"))[0] == 500
            assert (await _get(port, "/state"))[0] == 200
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_clients_that_leave_in_mid_request_do_not_end_the_node() -> None:
    requests = (
        b"POST /state HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n",
        b"GET /state HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        b"\x16\x03\x01" + bytes(500),
        b"GET / HTTP/1.1\r\n",
    )

    async def leave(port: int, request: bytes, wait_s: float) -> None:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        with suppress(trio.BrokenResourceError):
            await stream.send_all(request)
            await trio.sleep(wait_s)
        await trio.aclose_forcefully(stream)

    async def check(port: int) -> None:
        async with trio.open_nursery() as nursery:
            for round_number in range(10):
                for request in requests:
                    nursery.start_soon(leave, port, request, 0.002 * round_number)
        with trio.fail_after(10):
            assert (await _get(port, "/state"))[0] == 200

    _serving(check)


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /h HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: AAAA\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100),
        b"GET /h HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    ],
    ids=["upgrade with bad settings", "http/2 garbage", "no length"],
)
def test_what_one_client_provokes_ends_its_own_connection_alone(request_: bytes) -> None:
    async def answer_later(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/":
            asked.set()
            await go_on.wait()
        await PlainTextResponse("all of it")(scope, receive, send)

    async def main() -> None:
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                port = await nursery.start(serve_http, answer_later, "127.0.0.1", 0)
                nursery.start_soon(patient, port)
                await asked.wait()
                hostile = await trio.open_tcp_stream("127.0.0.1", port)
                await hostile.send_all(request_)
                await hostile.send_eof()
                with suppress(trio.BrokenResourceError):
                    while await hostile.receive_some():
                        pass
                await hostile.aclose()
                go_on.set()
                await served.wait()
                nursery.cancel_scope.cancel()

    async def patient(port: int) -> None:
        status, _, body = await _get(port, "/")
        assert (status, body) == (200, b"all of it")
        served.set()

    asked, go_on, served = trio.Event(), trio.Event(), trio.Event()
    trio.run(main)


def test_status_and_peers_print_the_state_of_the_running_node(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    places = Places(tmp_path, tmp_path)

    async def check(port: int) -> None:
        here = Whereabouts(pid=os.getpid(), peer="p", role="trainer", swarm="demo", http=f"http://127.0.0.1:{port}")
        places.whereabouts.write_bytes(msgspec.json.encode(here))
        await trio.to_thread.run_sync(partial(print_status, places, as_json=True))
        assert capsysbinary.readouterr().out == msgspec.json.encode(STATE) + b"\n"
        await trio.to_thread.run_sync(partial(print_status, places, as_json=False))
        assert STATE.join_line.encode() in capsysbinary.readouterr().out  # one line, so that it can be copied
        await trio.to_thread.run_sync(partial(print_peers, places, as_json=False))
        assert b"12D3KooWworker" in capsysbinary.readouterr().out

    _serving(check)


def test_a_silent_trainer_is_said_wherever_the_run_is_shown() -> None:
    assert STATE.run is not None
    note = "Trainer silent for 1 min 40 s: it has stopped, or lost its network."
    run = msgspec.structs.replace(STATE.run, trainer_age_s=100.0, trainer_note=note)
    peer = msgspec.structs.replace(STATE, role="inference", trainer=None, run=run)
    for render in (render_status, render_peers):
        assert note in _text(render(peer))
        assert note not in _text(render(STATE))
    assert "No run yet: a trainer of swarm demo" in _text(render_status(msgspec.structs.replace(peer, run=None)))

    async def check(port: int) -> None:
        assert b"echo_run_trainer_age_seconds 100.0" in (await _get(port, "/metrics"))[2]
        assert b"run.trainer_note" in (await _get(port, "/"))[2]

    _serving(check, peer)


def test_no_node_and_a_dead_node_are_said_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no node is running in .*echo-node join"):
        read_whereabouts(tmp_path)
    (tmp_path / "node.json").write_bytes(b"{")
    with pytest.raises(ConfigError, match="damaged"):
        read_whereabouts(tmp_path)
    gone = Whereabouts(pid=2**22 + 1, peer="p", role="trainer", swarm="demo", http="http://127.0.0.1:1")
    (tmp_path / "node.json").write_bytes(msgspec.json.encode(gone))
    with pytest.raises(ConfigError, match="has ended"):
        read_whereabouts(tmp_path)
    with pytest.raises(Unreachable, match="does not answer"):
        fetch_state("http://127.0.0.1:1", timeout_s=1.0)


def test_status_says_what_matters_in_words() -> None:
    text = _text(render_status(STATE))
    assert "Trainer 12D3KooWtrainer of swarm demo, up 1 min 0 s (process 42)." in text
    assert "Connected; it sees 1 other peer." in text
    assert "tiny on sokoban with grpo, async, lag at most 4, 8 groups of 8 a step" in text
    assert "about 1 more peer like the median" in text
    assert "500.0× smaller" in text
    assert "wrong signature" in text
    assert "10 s ago: peer joined" in text


def test_how_fast_a_device_was_measured_to_be_is_said_in_words() -> None:
    own = PeerView(
        peer="12D3KooWtrainer",
        role="inference",
        ours=True,
        layers_per_s=16929.5,
        head_layers=0.26,
        max_layers=4,
        ways=3,
    )
    text = " ".join(_text(render_status(msgspec.structs.replace(STATE, peers=(own, *STATE.peers[1:])))).split())
    assert (
        "This device holds 4 layers and computes 16,930 layers × tokens a second; the output matrix takes as long as "
        "0.3 layers; the ways to 3 other peers are measured."
    ) in text
    assert "16,930" in _text(render_peers(msgspec.structs.replace(STATE, peers=(own,))))
    assert "layers × tokens a second" not in _text(render_status(STATE))


def test_text_from_strangers_can_not_drive_the_terminal() -> None:
    stranger = PeerView(peer="12D3\x1b[2J", role="[bold]x", device="\x1b]0;title\x07" + "y" * 500)
    text = _text(render_peers(msgspec.structs.replace(STATE, peers=(stranger,))))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]x" in text
    assert "y" * 100 not in text


def _serving(check: Callable[[int], Awaitable[None]], state: NodeState = STATE) -> None:
    async def main() -> None:
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                port = await nursery.start(serve_http, build_app(lambda: state), "127.0.0.1", 0)
                await check(port)
                nursery.cancel_scope.cancel()

    trio.run(main)


async def _get(port: int, path: str, host: str = "localhost") -> tuple[int, dict[str, str], bytes]:
    def ask() -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", path, headers={"Host": host})
        response = connection.getresponse()
        answer = response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        connection.close()
        return answer

    return await trio.to_thread.run_sync(ask)


def _text(renderable: RenderableType) -> str:
    console = Console(width=160, no_color=True)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()
