"""The indexer's scores on Hopper."""
