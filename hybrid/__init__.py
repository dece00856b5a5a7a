"""Reinforcement learning from verifiable rewards and on-policy distillation in one objective."""
