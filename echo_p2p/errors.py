"""Every error that Echo raises on purpose. Knows no other module.

EchoError
├── ConfigError          the user's input: a key, a flag, a file            exit status 2
│   └── UnknownName      a name that is not in a table of names
├── IdentityError        the key file: unreadable, readable by others, not a key
├── ModelError           a model that can't be found, read or held
│   └── UnknownModel     a reference that names none; a ConfigError too
├── NetError             the network
│   ├── Unreachable      nobody answered, or not in time
│   │   └── NotServed    somebody did, and does not serve what was asked for: not yet, or no more
│   ├── StreamClosed     the other side went away in mid-conversation
│   └── FrameTooLarge    a message over its bound
├── RemoteError          the other side answered with a typed failure
├── WeightsError         patches, chunks and releases
│   ├── CorruptChunk     bytes that do not hash to their name
│   └── BaseMismatch     a patch that does not fit the weights it is applied to
├── ChainError           a chain that can't go on: a stage failed, stalled or left
└── TrainerError         the training engine

A message is one sentence that carries the offending value and the cure.
"""


class EchoError(Exception):
    """Base of all errors that Echo raises on purpose."""


class ConfigError(EchoError):
    """The user's input is wrong; the message names the key."""


class UnknownName(ConfigError):
    """A name that stands in no table; the message lists the names that do."""


class IdentityError(EchoError):
    """The identity key can't be used."""


class ModelError(EchoError):
    """A model can't be found, read or held."""


class UnknownModel(ModelError, ConfigError):
    """The user named a model that there is not, here or at the hub."""


class NetError(EchoError):
    """The network failed us."""


class Unreachable(NetError):
    """Nobody answered, or not before the deadline."""


class NotServed(Unreachable):
    """The peer is there, and serves no such protocol: it has not come so far, or does so no more."""


class StreamClosed(NetError):
    """The other side closed the stream, or went away."""


class FrameTooLarge(NetError):
    """A message is larger than its bound."""


class RemoteError(EchoError):
    """The other side answered with a typed failure."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class WeightsError(EchoError):
    """Patches, chunks and releases."""


class CorruptChunk(WeightsError):
    """Bytes do not hash to the name they were fetched under."""


class BaseMismatch(WeightsError):
    """A patch was made against other weights than these."""


class ChainError(EchoError):
    """A chain can't go on."""


class TrainerError(EchoError):
    """The training engine failed."""
