"""Learning from rollouts: tasks, rewards, buffer, trainer. Knows nothing of chains."""
