"""Typed configuration: the one place where a user's TOML and flags are checked. Reads no environment.

Precedence: flag > environment > TOML > default. The TOML is decoded into these structs, so an unknown key or a wrong
type is an error that names its path.
"""

import difflib
import ipaddress
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from echo_p2p.errors import ConfigError
from echo_protocols.keys import public_key
from echo_protocols.run import Admission, Algorithm, Protocol, Sampling, TaskSpec, check_group_tokens
from echo_protocols.values import Name

_ADDRESS = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/[^/\s]+/tcp/(?P<port>[0-9]{1,5})/p2p/(?P<peer>[A-Za-z0-9]+)")

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0.0)]
UploadRate = Annotated[float, Meta(ge=0.0, le=1e12)]
Port = Annotated[int, Meta(ge=0, le=65535)]


class NetworkConfig(Struct, frozen=True, kw_only=True):
    """Where a node listens and whom it dials first. Port 0 lets the system choose."""

    peers: tuple[str, ...] = ()
    host: str = "0.0.0.0"
    port: Port = 0
    gossip_port: Port = 0
    announce: tuple[str, ...] = ()
    http_host: str = "127.0.0.1"
    http_port: Port = 0


class RunConfig(Struct, frozen=True, kw_only=True):
    """What a run is: becomes the signed manifest, and has its bounds."""

    model: Name = "tiny"
    protocol: Protocol = "async"
    max_lag: Annotated[int, Meta(ge=0, le=1024)] = 4
    group_size: Annotated[int, Meta(ge=2, le=1024)] = 8
    groups_per_step: Annotated[int, Meta(ge=1, le=65536)] = 8
    prompts: Annotated[int, Meta(ge=1, le=2**40)] = 1_000_000
    seed: Annotated[int, Meta(ge=0, le=2**53)] = 1
    task: TaskSpec = TaskSpec()
    algorithm: Algorithm = Algorithm()
    sampling: Sampling = Sampling()
    admission: Admission = Admission()

    def __post_init__(self) -> None:
        check_group_tokens(self.group_size, self.sampling)


class TrainerConfig(Struct, frozen=True, kw_only=True):
    """How the trainer works; no peer needs to agree on it."""

    steps: Positive | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    checkpoint_every: Positive = 5
    snapshot_every: Positive = 20
    keep_releases: Positive = 40
    store_bytes: Positive = 8 << 30
    buffer_groups: Positive = 4096
    buffer_bytes: Positive = 1 << 30
    pull_deadline_s: Seconds = 60.0
    micro_batch_rows: Positive = 64
    upload_bytes_s: UploadRate = 0.0
    """Bytes a second, of all uploads of weights together; 0: no limit. Below 20,000, transfers time out."""


class InferenceConfig(Struct, frozen=True, kw_only=True):
    """What an inference peer gives, and to whom. `max_layers` 0 measures what fits in memory.

    `owner` is the PeerID whose runs are served: anybody may begin one in a swarm. Empty: the first that is found.
    """

    owner: str = ""
    model: str = ""
    """The folder of a copy of the run's model on this machine, whole or in part. Empty: it comes from hub or peers."""
    engine: Literal["auto", "torch", "mlx", "vllm"] = "auto"
    """What computes; `auto` takes mlx on Apple silicon, and vllm where an NVIDIA GPU holds the whole model, if they are
    installed and prove on this model that they compute it rightly; else torch."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    max_layers: Annotated[int, Meta(ge=0)] = 0
    memory_share: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.5
    store_bytes: Positive = 4 << 30
    upload_bytes_s: UploadRate = 0.0
    """Bytes a second, of all that is passed on to other peers; 0: no limit. Below 20,000, transfers time out."""
    lanes: Positive = 2
    lane_rows: Annotated[int, Meta(ge=0, le=256)] = 0
    """Answers that are computed together; at least a group's. An answer that is finished makes room for the next."""
    nice: Annotated[int, Meta(ge=0, le=19)] = 10
    """How far to stand back on a machine that has other work, as in nice(1)."""
    slowdown_s: Annotated[float, Meta(ge=0.0)] = 0.0
    """Seconds to wait after each decode step: makes a slow peer out of a fast one, for experiments."""


class NodeConfig(Struct, frozen=True, kw_only=True):
    """Everything one node needs to start."""

    swarm: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")] = "echo"
    role: Literal["bootstrap", "trainer", "inference"] = "inference"
    network: NetworkConfig = NetworkConfig()
    run: RunConfig = RunConfig()
    trainer: TrainerConfig = TrainerConfig()
    inference: InferenceConfig = InferenceConfig()


def load_config(path: Path | None, overrides: Mapping[str, object] | None = None) -> NodeConfig:
    """The configuration of a TOML file with `overrides` (dotted key → value) laid over it.

    Raises ConfigError, in one sentence with the path of the key.
    """
    document: dict[str, Any] = {}
    where = "the command line"
    if path is not None:
        where = str(path)
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"can't read the configuration {path}: {error.strerror}; check the path.") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}.") from error
    for key, value in (overrides or {}).items():
        _lay(document, key.split("."), value, where)
    _refuse_unknown(document, NodeConfig, "", where)
    try:
        config = msgspec.convert(document, NodeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_sentence(str(error))}") from error
    _check_addresses(config)
    return config


def dump_config(config: NodeConfig) -> bytes:
    """The resolved configuration as JSON, for the run's folder."""
    return msgspec.json.format(msgspec.json.encode(config), indent=2)


def is_address(address: str) -> bool:
    """Whether this is a plain TCP address of an Ed25519 PeerID: `/ip4/…/tcp/…/p2p/12D3…`."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 65536:
        return False
    return is_peer(found["peer"])


def is_peer(peer: str) -> bool:
    """Whether this is an Ed25519 PeerID."""
    try:
        public_key(peer)
    except ValueError:
        return False
    return True


def _check_addresses(config: NodeConfig) -> None:
    network = config.network
    for address in network.peers:
        if not is_address(address):
            raise ConfigError(f"--peer {address} is no address; copy it whole: /ip4/…/tcp/…/p2p/12D3….")
    for host in (network.host, network.http_host):
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise ConfigError(
                f"{host} is no IP address to listen on; write 0.0.0.0, or 127.0.0.1 for this machine."
            ) from None
    if config.inference.owner and not is_peer(config.inference.owner):
        raise ConfigError(f"--owner {config.inference.owner} is no PeerID; it must look like 12D3Koo….")


def _lay(document: dict[str, Any], keys: list[str], value: object, where: str) -> None:
    for key in keys[:-1]:
        document = document.setdefault(key, {})
        if not isinstance(document, dict):
            raise ConfigError(f"{where}: `{'.'.join(keys[:-1])}` must be a table.")
    document[keys[-1]] = value


def _refuse_unknown(document: Mapping[str, Any], schema: type[Struct], path: str, where: str) -> None:
    # by hand, since the wire's structs ignore unknown fields and a user's typing error must not be ignored
    fields = {field.name: field.type for field in msgspec.structs.fields(schema)}
    for key, value in document.items():
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean `{path}{close[0]}`?" if close else f"known keys: {', '.join(sorted(fields))}."
            raise ConfigError(f"{where}: unknown key `{path}{key}`; {hint}")
        nested = _table(fields[key])
        if isinstance(value, dict) and nested is not None:
            _refuse_unknown(value, nested, f"{path}{key}.", where)


def _table(kind: Any) -> type[Struct] | None:
    """The struct that a field of this type holds, optional ones included; None if it holds another value."""
    kinds = [each for each in (kind, *get_args(kind)) if isinstance(each, type) and issubclass(each, Struct)]
    return kinds[0] if kinds else None


def _sentence(message: str) -> str:
    """msgspec's `what - at $.a.b` as `a.b`: what."""
    what, separator, path = message.partition(" - at `$")
    key = path.rstrip("`").lstrip(".") if separator else ""
    choices = _choices(key.split(".")) if what.startswith("Invalid enum value") else ()
    cure = f". Choose {', '.join(choices[:-1])} or {choices[-1]}" if choices else ""
    return f"`{key}`: {what}{cure}." if key else f"{what}."


def _choices(keys: list[str]) -> tuple[str, ...]:
    """The values that the key of an enumeration takes."""
    schema: Any = NodeConfig
    for key in keys:
        if (table := _table(schema)) is None:
            return ()
        schema = next(field.type for field in msgspec.structs.fields(table) if field.name == key)
    choices = [get_args(each) for each in (schema, *get_args(schema)) if get_origin(each) is Literal]
    return choices[0] if choices else ()
