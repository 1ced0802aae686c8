"""The Echo library: membership, weights, chains and reinforcement learning of a swarm."""
