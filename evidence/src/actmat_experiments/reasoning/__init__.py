"""The paper's reasoning experiment: merge experts of reinforcement learning, evaluate language models."""
