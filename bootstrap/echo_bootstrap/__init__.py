"""The rendezvous peer of a swarm."""
