"""Cost without a clock."""
