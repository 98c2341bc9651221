"""Dense MHA prefill and its backward on Hopper."""
