"""Two homes behind NAT, in network namespaces: they reach each other through the bootstrap, also when it restarts.

    boot  11.99.0.2 ──┐
                      ├── 11.99.0.0/24 ──┬── home1 11.99.0.11 ── 192.168.1.0/24 ── vol1
    train 11.99.0.6 ──┘                  └── home2 11.99.0.12 ── 192.168.2.0/24 ── vol2

The namespaces have no way out. Run as a program, this file is one of the nodes: it reads a command a line from stdin
and answers with a line of JSON.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from echo_node.learning import RunLog

ROOT = Path(__file__).resolve().parents[1]
ECHO = "/echo-test/1"
SWARM = "homes"
PORT = 4001
TOOLS = ("ip", "nft", "sysctl")
MEGABYTES = 4
OBSERVERS = (3, 4, 5)
"""More public addresses: a daemon believes four that its router keeps ports, and then helps itself through it."""


def what_is_missing() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)} (packages iproute2, nftables, procps)" if missing else ""


pytestmark = [pytest.mark.network, pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing() or "none")]


class Internet:
    """The namespaces; gone when the context is left."""

    def __init__(self) -> None:
        self._prefix = f"echo-nat-{os.getpid()}-"
        self._made: list[str] = []

    def __enter__(self) -> "Internet":
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        while self._made:
            subprocess.run(["ip", "netns", "del", self._made.pop()], check=False)

    def inside(self, name: str, *command: str) -> list[str]:
        """The command line that runs `command` in a namespace."""
        return ["ip", "netns", "exec", self._prefix + name, *command]

    def make_router(self, home: str, kind: str) -> None:
        """`cone` keeps ports, `symmetric` takes another for each connection; both drop what nobody asked for."""
        how = {"cone": "", "symmetric": "random,fully-random"}[kind]
        rules = f"""
            flush ruleset
            table ip nat {{
                chain out {{
                    type nat hook postrouting priority srcnat;
                    oifname "wan" masquerade {how}
                }}
            }}
            table ip filter {{
                chain in {{
                    type filter hook input priority filter;
                    iifname "wan" ct state established,related accept
                    iifname "wan" drop
                }}
                chain through {{
                    type filter hook forward priority filter; policy drop;
                    iifname "lan" accept
                    ct state established,related accept
                }}
            }}"""
        run(*self.inside(home, "nft", "-f", "-"), stdin=rules)

    def forward(self, home: str, port: int, to: str) -> None:
        """What the owner of a router does to make a node public."""
        for rule in (
            "add chain ip nat in { type nat hook prerouting priority dstnat; }",
            f'add rule ip nat in iifname "wan" tcp dport {port} dnat to {to}:{port}',
            f'insert rule ip filter through iifname "wan" tcp dport {port} accept',
        ):
            run(*self.inside(home, "nft", *rule.split()))

    def _build(self) -> None:
        for name in ("street", "boot", "train", "home1", "home2", "vol1", "vol2"):
            run("ip", "netns", "add", self._prefix + name)
            self._made.append(self._prefix + name)
            run(*self.inside(name, "ip", "link", "set", "lo", "up"))
        self._do("street", "link add street type bridge")
        self._do("street", "link set street up")
        for name, host in (("boot", 2), ("train", 6), ("home1", 11), ("home2", 12)):
            self._cable(name, "wan", "street", f"to-{name}")
            self._do("street", f"link set to-{name} master street")
            self._do(name, f"addr add 11.99.0.{host}/24 dev wan")
        for host in OBSERVERS:
            self._do("boot", f"addr add 11.99.0.{host}/24 dev wan")
        for number in (1, 2):
            home, volunteer = f"home{number}", f"vol{number}"
            self._cable(volunteer, "eth0", home, "lan")
            self._do(home, f"addr add 192.168.{number}.1/24 dev lan")
            self._do(volunteer, f"addr add 192.168.{number}.10/24 dev eth0")
            self._do(volunteer, f"route add default via 192.168.{number}.1")
            run(*self.inside(home, "sysctl", "-qw", "net.ipv4.ip_forward=1"))

    def _do(self, name: str, words: str) -> None:
        run(*self.inside(name, "ip", *words.split()))

    def _cable(self, name: str, end: str, other: str, other_end: str) -> None:
        ends = ["type", "veth", "peer", "name", other_end, "netns", self._prefix + other]
        run("ip", "link", "add", end, "netns", self._prefix + name, *ends)
        self._do(name, f"link set {end} up")
        self._do(other, f"link set {other_end} up")


def run(*command: str, stdin: str = "") -> None:
    subprocess.run(command, input=stdin, text=True, check=True, timeout=10)


def environment_of_nodes() -> dict[str, str]:
    packages = os.pathsep.join(str(ROOT / folder) for folder in ("", "protocols", "bootstrap", "node"))
    return {**os.environ, "PYTHONPATH": packages, "OMP_NUM_THREADS": "1"}


class Node:
    """One node in a process of its own; `ask` gives it a command."""

    def __init__(self, internet: Internet, place: str, home: Path, *, peer: str = "") -> None:
        program = [sys.executable, str(Path(__file__)), str(home), peer]
        self.log = home.with_suffix(".log")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                internet.inside(place, *program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env=environment_of_nodes(), text=True, bufsize=1,
            )  # fmt: skip

    def ask(self, *command: object, timeout_s: float = 60.0) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        return self.hear(timeout_s)

    def hear(self, timeout_s: float = 60.0) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            pytest.fail(f"a node is silent:\n{self.log.read_text()[-4000:]}")
        return json.loads(line)

    def until(self, what: str, *command: object, deadline_s: float) -> float:
        """Ask until the answer is true; how long it took, in seconds."""
        began_at = time.monotonic()
        while not (answer := self.ask(*command)):
            if time.monotonic() - began_at > deadline_s:
                pytest.fail(f"{what}: not within {deadline_s} s: {answer}\n{self.log.read_text()[-4000:]}")
            time.sleep(0.5)
        return time.monotonic() - began_at

    def stop(self, number: int = signal.SIGTERM) -> None:
        self._process.send_signal(number)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def started(internet: Internet, place: str, home: Path, *, peer: str = "") -> Iterator[Node]:
    node = Node(internet, place, home, peer=peer)
    try:
        yield node
    finally:
        node.stop()


@pytest.mark.parametrize("kinds", [("cone", "cone"), ("cone", "symmetric")], ids="-".join)
def test_two_homes_reach_each_other_and_do_again_when_the_bootstrap_was_restarted(
    tmp_path: Path, kinds: tuple[str, str]
) -> None:
    with Internet() as internet, contextlib.ExitStack() as stack:
        for number, kind in enumerate(kinds, 1):
            internet.make_router(f"home{number}", kind)
        boot = stack.enter_context(started(internet, "boot", tmp_path / "boot"))
        bootstrap = f"/ip4/11.99.0.2/tcp/{PORT}/p2p/{boot.hear()}"
        one, other = (
            stack.enter_context(started(internet, f"vol{number}", tmp_path / f"vol{number}", peer=bootstrap))
            for number in (1, 2)
        )
        peers = {one: other.hear(), other: one.hear()}
        for node, peer in peers.items():
            node.until("is reached through the relay", "reach is", "relayed", deadline_s=30)
            node.until("knows where the other is", "has circuit of", peer, deadline_s=30)
        for node, peer in peers.items():
            assert node.ask("send", peer, MEGABYTES) == MEGABYTES << 20

        boot.stop(signal.SIGKILL)
        restarted_at = time.monotonic()
        boot = stack.enter_context(started(internet, "boot", tmp_path / "boot"))
        boot.hear()
        for node, peer in peers.items():
            node.until("reaches the other again", "try", peer, deadline_s=60)
            assert node.ask("send", peer, MEGABYTES) == MEGABYTES << 20
        took_s = time.monotonic() - restarted_at
        assert took_s < 60, took_s
        for node in peers:
            node.until("says so in its record", "reach is", "relayed", deadline_s=30)


def test_two_cones_talk_directly_once_enough_public_peers_have_seen_them(tmp_path: Path) -> None:
    with Internet() as internet, contextlib.ExitStack() as stack:
        for home in ("home1", "home2"):
            internet.make_router(home, "cone")
        boot = stack.enter_context(started(internet, "boot", tmp_path / "boot"))
        public = [f"/ip4/11.99.0.2/tcp/{PORT}/p2p/{boot.hear()}"]
        public += [boot.ask("also at", f"11.99.0.{host}") for host in OBSERVERS]
        told = ",".join(public)
        one, other = (
            stack.enter_context(started(internet, f"vol{number}", tmp_path / f"vol{number}", peer=told))
            for number in (1, 2)
        )
        peers = {one: other.hear(), other: one.hear()}
        for node, peer in peers.items():
            node.until("knows where the other is", "has circuit of", peer, deadline_s=30)
        one.until("reaches the other", "try", peers[one], deadline_s=30)
        one.until("has a direct connection", "sees at", peers[one], "/ip4/11.99.0.12/", deadline_s=30)
        assert one.ask("send", peers[one], MEGABYTES) == MEGABYTES << 20


def test_a_forwarded_port_makes_a_home_public(tmp_path: Path) -> None:
    with Internet() as internet, contextlib.ExitStack() as stack:
        for home in ("home1", "home2"):
            internet.make_router(home, "symmetric")
        internet.forward("home1", PORT, "192.168.1.10")
        boot = stack.enter_context(started(internet, "boot", tmp_path / "boot"))
        bootstrap = f"/ip4/11.99.0.2/tcp/{PORT}/p2p/{boot.hear()}"
        one = stack.enter_context(started(internet, "vol1", tmp_path / "vol1", peer=bootstrap))
        other = stack.enter_context(started(internet, "vol2", tmp_path / "vol2", peer=bootstrap))
        peer, _ = one.hear(), other.hear()
        one.until("is public", "reach is", "public", deadline_s=30)
        other.until("is told so", "has address", peer, f"/ip4/11.99.0.11/tcp/{PORT}/", deadline_s=30)
        other.until("is not", "reach is", "relayed", deadline_s=30)
        assert other.ask("send", peer, MEGABYTES) == MEGABYTES << 20
        assert other.ask("sees at", peer, "/ip4/11.99.0.11/")


@pytest.mark.slow
def test_a_chain_of_two_homes_serves_a_trainer_and_goes_on_when_the_bootstrap_was_restarted(tmp_path: Path) -> None:
    with Internet() as internet, contextlib.ExitStack() as stack:
        internet.make_router("home1", "cone")
        internet.make_router("home2", "symmetric")
        ports = ("--port", str(PORT), "--gossip-port", str(PORT + 1))

        def begin(place: str, *flags: str) -> subprocess.Popen[bytes]:
            home = tmp_path / place
            command = [sys.executable, "-m", "echo_node", "--home", str(home), *flags, *ports]
            with home.with_suffix(".log").open("ab") as log:
                process = subprocess.Popen(
                    internet.inside(place, *command), stdout=log, stderr=log, env=environment_of_nodes()
                )
            stack.callback(end, process)
            return process

        def steps() -> int:
            return sum(len(RunLog(run).read()) for run in (tmp_path / "train" / "runs").glob("*"))

        def wait(what: str, done: Callable[[], object], deadline_s: float) -> None:
            gives_up_at = time.monotonic() + deadline_s
            while not done():
                if time.monotonic() > gives_up_at:
                    logs = "\n".join(path.read_text()[-2000:] for path in tmp_path.glob("*.log"))
                    pytest.fail(f"{what}: not within {deadline_s} s\n{logs}")
                time.sleep(0.2)

        boot = begin("boot", "bootstrap", "--host", "11.99.0.2")
        wait("the bootstrap is up", lambda: (tmp_path / "boot" / "node.json").exists(), 40)
        whereabouts = json.loads((tmp_path / "boot" / "node.json").read_bytes())
        told = ("--peer", f"/ip4/11.99.0.2/tcp/{PORT}/p2p/{whereabouts['peer']}")
        begin("train", "join", "--role", "trainer", *told)
        for volunteer in ("vol1", "vol2"):
            begin(volunteer, "join", "--role", "inference", "--max-layers", "2", *told)
        wait("the trainer has steps", lambda: steps() >= 2, 90)

        end(boot, signal.SIGKILL)
        begin("boot", "bootstrap", "--host", "11.99.0.2")
        before = steps()
        wait("the chain goes on", lambda: steps() >= before + 3, 60)  # more than what was on its way


def end(process: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> None:
    process.send_signal(number)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# The program


async def live(home: Path, peer: str) -> None:
    """One node: a bootstrap, or a volunteer if it is told of some. Ends with its stdin."""
    from echo_bootstrap.server import run_bootstrap
    from echo_p2p.config import NetworkConfig
    from echo_p2p.identity import load_or_create
    from echo_p2p.presence import open_presence
    from echo_protocols.peer import RoleRecord

    host = "0.0.0.0" if peer else "11.99.0.2"
    network = NetworkConfig(host=host, peers=tuple(peer.split(",")) if peer else (), port=PORT, gossip_port=PORT + 1)
    record = RoleRecord(role="inference" if peer else "bootstrap", software="test")
    identity = load_or_create(home / "identity.key")
    async with open_presence(identity, swarm=SWARM, network=network, record=record) as presence:
        with trio.fail_after(30):
            await presence.hive.wait_joined()
        async with trio.open_nursery() as nursery:
            if not peer:
                nursery.start_soon(run_bootstrap, presence)
            await nursery.start(presence.hive.serve, ECHO, echo)
            say(identity.peer_id)
            while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
                say(await obey(presence, nursery, *json.loads(line)))
            nursery.cancel_scope.cancel()


async def be_public(host: str, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
    """One more public peer in this process; started with its address."""
    from echo_p2p.identity import generate
    from echo_p2p.net.hive import HiveSettings, open_hive

    async with open_hive(generate(), HiveSettings(role="trainer", listen=(f"/ip4/{host}/tcp/{PORT}",))) as node:
        task_status.started((await node.visible_addresses())[0])
        await trio.sleep_forever()


async def obey(presence: Any, nursery: trio.Nursery, command: str, *arguments: Any) -> object:
    from echo_p2p.errors import NetError

    members = presence.swarm.members
    match command, arguments:
        case "reach is", [reach]:
            own = members.get(presence.identity.peer_id)
            return own is not None and own.record.reach == reach
        case "has circuit of", [peer]:
            return peer in members and any("/p2p-circuit" in address for address in members[peer].record.streams)
        case "has address", [peer, beginning]:
            return peer in members and any(each.startswith(beginning) for each in members[peer].record.streams)
        case "sees at", [peer, beginning]:
            seen = await presence.hive.seen_at(peer)
            return any(each.startswith(beginning) and "/p2p-circuit" not in each for each in seen)
        case "also at", [host]:
            return await nursery.start(be_public, host)
        case "send", [peer, megabytes]:
            return await send(presence, peer, megabytes)
        case "try", [peer]:
            try:
                return await send(presence, peer, 1)
            except NetError as error:
                print(f"tried {peer}: {error}", file=sys.stderr)
                return 0
    raise ValueError(command)


async def send(presence: Any, peer: str, megabytes: int) -> int:
    """Send so much over one stream, which sends it back; the bytes that came back."""
    frame, came = os.urandom(1 << 18), 0
    with trio.fail_after(30):
        async with presence.hive.open(peer, ECHO) as stream:
            for _ in range(megabytes * 4):
                await stream.send(frame)
                assert await stream.receive() == frame
                came += len(frame)
    return came


async def echo(stream: Any) -> None:
    while True:
        await stream.send(await stream.receive())


def say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    import logging

    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(name)s %(message)s")
    logging.getLogger("echo_p2p.net").setLevel(logging.DEBUG)
    home_folder = Path(sys.argv[1])
    home_folder.mkdir(exist_ok=True)
    trio.run(live, home_folder, sys.argv[2])
