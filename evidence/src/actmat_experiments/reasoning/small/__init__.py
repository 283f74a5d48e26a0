"""The reasoning experiment on two cores: a small base, three experts by reinforcement learning, all merges."""
