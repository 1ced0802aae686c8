"""Rollouts from a pipeline of peers: plan, stages, sampling and the driver. Knows nothing of rewards or training."""
