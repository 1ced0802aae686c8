"""Names of topics, record keys and stream protocols. One swarm never hears another's."""

PROTOCOL_VERSION = (1, 0)
"""Major and minor version of everything on the wire."""

HOP = "/echo/hop/1"
BLOB = "/echo/blob/1"
PULL = "/echo/pull/1"
HOLDERS = "/echo/holders/1"
DIAL_BACK = "/echo/dial-back/1"
PING = "/echo/ping/1"
CALL_PROTOCOLS = (HOP, BLOB, PULL, HOLDERS, PING)


def rollout_topic(swarm: str) -> str:
    """Where inference peers publish rollout groups; trainers and bootstraps subscribe."""
    return f"echo/{swarm}/rollouts/1"


def large_rollout_topic(swarm: str) -> str:
    """Where inference peers name rollout groups that are too large for gossip, by hash."""
    return f"echo/{swarm}/large-rollouts/1"


def release_topic(swarm: str) -> str:
    """Where trainers announce releases; everybody subscribes."""
    return f"echo/{swarm}/releases/1"


def topics(swarm: str) -> tuple[str, ...]:
    """Every topic of a swarm."""
    return (rollout_topic(swarm), large_rollout_topic(swarm), release_topic(swarm))


def role_key(swarm: str) -> str:
    """Role records, one for each peer."""
    return f"echo/{swarm}/roles/1"


def run_key(swarm: str) -> str:
    """The run manifest, by the run's owner."""
    return f"echo/{swarm}/run/1"


def plan_key(swarm: str) -> str:
    """The plan, by a trainer."""
    return f"echo/{swarm}/plan/1"


def release_key(swarm: str) -> str:
    """The latest release, by a trainer: its version and the hash of the sealed release."""
    return f"echo/{swarm}/release/1"
